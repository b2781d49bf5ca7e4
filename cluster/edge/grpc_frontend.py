"""HAProxy's port for gRPC: it turns the calls into HTTP/1.1 requests to the ingress replicas.

The requests of both ports use the same backends, and so share their limits. Errors that HAProxy
itself writes are gRPC's here: no body, and the status in the head.
"""

from __future__ import annotations

import socket
from pathlib import Path

from cluster.edge.error_files import ERRORS, RETRY_AFTER_S, RETRYABLE
from cluster.edge.haproxy_config import (
    CLIENT_TABLE,
    ClientLimits,
    build_client_rules,
    build_denial,
    build_error_files,
    build_tls_options,
    find_routes,
)
from deployments.grpc_status import (
    GRPC_PATHS,
    HEALTH_CHECK,
    INFERENCE_METHODS,
    INFERENCE_SERVICE,
    GrpcStatus,
    build_error_headers,
    from_http_status,
)

# Errors by HTTP status. That of 400 tells clients of HTTP to leave HTTP/2.
_ERRORS = {status: message for status, (_, message) in ERRORS.items() if status != 400}
_ERRORS[404] = (
    f"this port serves only {', '.join(INFERENCE_METHODS)} of `{INFERENCE_SERVICE.strip('/')}`, "
    f"and `{HEALTH_CHECK.strip('/')}`. It has no streams: in place of `Watch`, repeat `Check`"
)


class GrpcFrontend:
    """The frontend on `listener`, with error files in `directory`."""

    def __init__(self, listener: socket.socket, directory: Path, limits: ClientLimits) -> None:
        self.listener_fd = listener.fileno()
        self._errors = {status: directory / f"{status}.grpc" for status in _ERRORS}
        self._limits = limits

    def write_errors(self) -> None:
        for status, path in self._errors.items():
            path.write_bytes(_build_error(status))

    def build(self, certificate: Path | None, routed: str = "") -> str:
        """Return the section to append to a configuration.

        `routed` is Ray Serve's configuration. Without routes, all calls get UNAVAILABLE.

        A client counts twice: its connections in the table of this frontend, and its calls in that
        of the HTTP frontend, together with its connections there. Both have the same limit.
        """
        connections = self._limits.connections
        routes = find_routes(routed) or "    default_backend starting\n"
        # A stream would wait here for the end of its body, so no other method passes.
        unknown = f"unless {{ path {' '.join(GRPC_PATHS)} }}"
        bind = " proto h2" if certificate is None else build_tls_options(certificate, "h2")
        return (
            # Serve's configuration uses three counters, which is the default number.
            "global\n    tune.stick-counters 4\n"
            f"frontend grpc_frontend\n    bind fd@{self.listener_fd}{bind}\n"
            f"{build_error_files(self._errors)}"
            f"{CLIENT_TABLE}"
            "    tcp-request connection track-sc3 var(sess.client)\n"
            f"    tcp-request connection reject if {{ sc_conn_cur(3) gt {connections} }}\n"
            "    http-request track-sc0 var(sess.client) table http_frontend\n"
            f"    http-request deny deny_status 429 if {{ sc0_conn_cur gt {connections} }}\n"
            f"{build_denial(unknown)}"
            f"{build_client_rules(self._limits)}"
            f"{routes}"
        )


def _build_error(status: int) -> bytes:
    """Build an answer with HTTP status 200, or clients would ignore the status of gRPC."""
    # The ingress has 404 for unknown models too, but HAProxy knows no models.
    grpc_status = GrpcStatus.UNIMPLEMENTED if status == 404 else from_http_status(status)
    headers = build_error_headers(grpc_status, _ERRORS[status])
    if status in RETRYABLE:
        headers |= {
            "retry-after": str(RETRY_AFTER_S),
            "grpc-retry-pushback-ms": str(RETRY_AFTER_S * 1000),
        }
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()
