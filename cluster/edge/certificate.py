"""TLS certificate of the edge, in the one file that HAProxy reads."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

from deployments.errors import ServeError
from deployments.files import write_atomically


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
        """Return the content of both files. Raises UnusableCertificate for unusable files."""
        try:
            contents = [path.read_bytes() for path in (self.chain, self.key) if path is not None]
        except OSError as error:
            raise UnusableCertificate(
                f"cannot read the certificate file `{error.filename}`: {error.strerror}"
            ) from error
        pem = b"\n".join(contents)
        _check(pem, self)
        return pem


class Certificate:
    """The certificate that HAProxy serves with, in a private directory."""

    def __init__(self, files: CertificateFiles, directory: Path) -> None:
        self.path = directory / "certificate.pem"
        self._files = files
        self._pem = b""

    def renew(self) -> bool:
        """Read the files of the operator, and return whether they have changed.

        Raises UnusableCertificate; the former certificate then stays in use.
        """
        pem = self._files.read()
        is_new = pem != self._pem
        self._pem = pem
        return is_new

    def write(self) -> None:
        """Write the file for HAProxy."""
        write_atomically(self.path, self._pem, mode=0o600)


def _check(pem: bytes, files: CertificateFiles) -> None:
    """Raise UnusableCertificate if OpenSSL cannot serve with the key and the chain in `pem`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(prefix="hundredfold-") as copy:  # only this user can read it
        copy.write(pem)
        copy.flush()
        try:
            context.load_cert_chain(copy.name, password=_refuse_password)
        except (ssl.SSLError, ValueError) as error:
            raise UnusableCertificate(
                f"{files} cannot be used for TLS: {_explain(error)}"
            ) from error


def _refuse_password() -> str:
    # Without this function OpenSSL would ask the terminal.
    raise ValueError("the private key is encrypted, and HAProxy needs it without a password")


def _explain(error: ssl.SSLError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the private key belongs to another certificate"
    return f"it needs a certificate and its private key, both as PEM ({error.reason or error})"
