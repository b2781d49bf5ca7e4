"""TLS of TCP channels, with the certificates that Ray's own connections use."""

from __future__ import annotations

import ssl
from functools import partial
from typing import NamedTuple

from deployments.config import RayTlsFiles


class TlsContexts(NamedTuple):
    """TLS contexts of both ends; None means no TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None

    @classmethod
    def load(cls, files: RayTlsFiles | None) -> TlsContexts:
        """Build contexts that require a certificate of the cluster's authority from both sides.

        Ray has the same rule. Host names are not compared, because pods are addressed by IP.
        Instead, the replica proves in the channel's handshake that it knows its secret key.
        """
        if files is None:
            return cls()
        build = partial(_build_context, files)
        return cls(build(ssl.PROTOCOL_TLS_SERVER), build(ssl.PROTOCOL_TLS_CLIENT))


def _build_context(files: RayTlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.authority)
    return context
