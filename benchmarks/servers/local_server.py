"""A running server of this host, which the benchmark did not start."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.servers.process_kinds import KINDS, find_processes


def find_launcher(address: ServerAddress) -> int:
    """Return the pid of the leader of the session whose process listens on the server's port.

    The launcher of a server leads the session of all its processes, see cluster/processes.py.
    Raises BenchmarkError for a server on another host, if no process is found, and if the session
    has no process of a server, such as that of a container's proxy.
    """
    if not _is_this_host(address.host):
        raise BenchmarkError(
            f"`{address.host}` is not this host", hint="run the benchmark on the host of the server"
        )
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_at_port = getattr(connection.laddr, "port", None) == address.port
            if is_at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                launcher = os.getsid(connection.pid)
                if any(find_processes(launcher, kind) for kind in KINDS.values()):
                    return launcher
    raise BenchmarkError(
        f"no visible process of a server listens on port {address.port}",
        hint="start the server with `make serve`, or run as its user or as root",
    )


def _is_this_host(host: str) -> bool:
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    # `0.0.0.0` and `::` connect to this host.
    return any(each in own or ipaddress.ip_address(each).is_unspecified for each in found)
