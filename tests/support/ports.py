"""Ports for servers of tests, which bind them later."""

from __future__ import annotations

import errno
import random
import socket

from cluster.ports import is_port_free

# Above the ports of Serve's replicas. Not those of outgoing connections (from 32768): until a
# server binds its port, a connection of any process could take it.
_PORTS = range(31_001, 32_768)
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a free port that no test process gets again before this process ends."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if is_port_free("0.0.0.0", port) and _claim(port):
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


def _claim(port: int) -> bool:
    """Bind the name of an abstract Unix socket, which the kernel frees when this process ends."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0hundredfold-test-port-{port}")
    except OSError as exc:
        claim.close()
        if exc.errno == errno.EADDRINUSE:
            return False
        raise
    _claims.append(claim)
    return True


def port_is_open(port: int) -> bool:
    """Return whether the port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
