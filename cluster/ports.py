"""TCP ports of this host: which are free, which process has one."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

import psutil

PORTS = range(1, 1 << 16)
HTTP_PORT = 8000  # default of Serve for `http_options.port`; a copy, as Serve imports slowly
DASHBOARD_PORT = 8265  # of Ray
HAPROXY_METRICS_PORT = 9101
HAPROXY_STATUS_PORT = 8404
WORKER_PORTS = range(10_002, 20_000)  # of Ray's workers
REPLICA_PORTS = range(30_000, 31_001)  # of Serve's replicas
BACKLOG = 4096  # maximum waiting connections; the kernel caps it at net.core.somaxconn


def is_port_free(host: str, port: int) -> bool:
    """Return whether no process listens on `host`:`port`.

    Raises OSError if this process cannot listen there for another reason, and OverflowError for a
    port above 65535.
    """
    with socket.socket(_address_family(host)) as probe:
        # HAProxy sets this option too, so connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port`. The host `::` accepts IPv4 too.

    Connections wait in the backlog while HAProxy is restarted.
    """
    family = _address_family(host)
    is_dual = family is socket.AF_INET6
    return socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual
    )


def format_address(host: str, port: int) -> str:
    """Join host and port as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if _address_family(host) is socket.AF_INET6 else f"{host}:{port}"


def _address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def find_free_port(preferred: int, *reserved: int) -> int:
    """Return `preferred` if it is free and not `reserved`, else another such port."""
    port = preferred
    while port in reserved or not is_port_free("0.0.0.0", port):
        with socket.socket() as probe:  # the kernel chooses a port for port 0
            probe.bind(("0.0.0.0", 0))
            port = probe.getsockname()[1]
    return port


def describe_port_owner(port: int) -> str:
    """Describe the process that listens on `port`. Only root can see processes of other users."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            at_port = getattr(connection.laddr, "port", None) == port
            if at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({process.name()})"
    return "another process"
