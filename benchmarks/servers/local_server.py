"""A running server of this host, which the benchmark did not start."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress

import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress


def find_launcher(address: ServerAddress) -> int:
    """Return the pid of the leader of the session whose process listens on the server's port.

    The launcher of a server leads the session of all its processes, see cluster/processes.py.
    Raises BenchmarkError for a server on another host, and if no process is found.
    """
    if not _is_this_host(address.host):
        raise BenchmarkError(
            f"`{address.host}` is not this host", hint="run the benchmark on the host of the server"
        )
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_at_port = getattr(connection.laddr, "port", None) == address.port
            if is_at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return os.getsid(connection.pid)
    raise BenchmarkError(
        f"no visible process listens on port {address.port}",
        hint="start the server with `make serve`, or run as its user or as root",
    )


def _is_this_host(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
