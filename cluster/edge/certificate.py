"""TLS certificate of the edge: the files of the operator, and the one that HAProxy reads."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple

from deployments.errors import ServeError


class UnusableCertificate(ServeError):
    """The files of a certificate cannot be read, or do not belong together."""

    code = "unusable_certificate"


class CertificateFiles(NamedTuple):
    """PEM files that the operator renews."""

    chain: Path  # the certificate of the server first, then those of the authorities that signed it
    key: Path | None = None  # None: `chain` also has the private key

    def __str__(self) -> str:
        return " with ".join(f"`{path}`" for path in self if path is not None)

    def read(self) -> bytes:
        """Return the content of both files. Raises UnusableCertificate if one cannot be read."""
        try:
            return b"\n".join(path.read_bytes() for path in self if path is not None)
        except OSError as error:
            raise UnusableCertificate(
                f"cannot read the certificate file `{error.filename}`: {error.strerror}"
            ) from error

    def check(self, pem: bytes) -> None:
        """Raise UnusableCertificate if OpenSSL cannot serve with `pem`, what `read` returned."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # OpenSSL loads files only. This one is in memory, because it has the private key.
        with open(os.memfd_create("certificate"), "wb") as copy:
            copy.write(pem)
            copy.flush()
            try:
                context.load_cert_chain(f"/proc/self/fd/{copy.fileno()}", password=_refuse_password)
            except (ssl.SSLError, ValueError) as error:
                message = f"{self} cannot be used for TLS: {_explain(error)}"
                raise UnusableCertificate(message) from error


def _refuse_password() -> str:
    # Without this function OpenSSL would ask the terminal.
    raise ValueError("the private key is encrypted, and HAProxy needs it without a password")


def _explain(error: ssl.SSLError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    reason = error.reason or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return "the private key belongs to another certificate"
    if reason.endswith(("_TOO_SMALL", "_TOO_WEAK")):
        return f"its key or a signature is too weak ({reason})"
    return f"it needs a certificate and its private key, both as PEM ({reason})"
