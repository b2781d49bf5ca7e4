"""Ports of one `hundredfold serve`: their choice, and claims that keep other launchers off them."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from cluster.ports import (
    DASHBOARD_PORT,
    HAPROXY_METRICS_PORT,
    HAPROXY_STATUS_PORT,
    PORTS,
    REPLICA_PORTS,
    WORKER_PORTS,
    describe_port_owner,
    find_free_port,
    format_address,
    is_port_free,
)
from cluster.start_errors import StartError

CLAIM_PREFIX = "\0hundredfold-port-"  # of the name of an abstract socket that claims a port
DEFAULT_PORTS = {
    "dashboard": DASHBOARD_PORT,
    "metrics": HAPROXY_METRICS_PORT,
    "haproxy_stats": HAPROXY_STATUS_PORT,
}
# Ports that no operator or client addresses are random, so that they occupy no number that another
# server may want. Their range is above Ray's ports for workers and below Serve's for replicas. It
# is outside of the range for outgoing connections (from 32768), any of which could take the port of
# a Ray that is being restarted.
_INNER_PORTS = range(WORKER_PORTS.stop, REPLICA_PORTS.start)
_INNER_NAMES = ("gcs", "raylet", "agent", "fallback_http", "fallback_grpc")


@dataclass(frozen=True, slots=True)
class LocalPorts:
    """Ports of Ray and HAProxy on one host, except those for clients.

    They are on loopback. Only the metrics port can be on another address (`--metrics-host`).
    """

    gcs: int
    raylet: int
    dashboard: int
    agent: int
    metrics: int  # port of `/metrics`, and of HAProxy's own metrics at `/haproxy`
    haproxy_stats: int
    fallback_http: int
    fallback_grpc: int

    @classmethod
    def choose(
        cls,
        claims: ExitStack,
        *,
        reserved: int,
        metrics: int | None = None,
        grpc: int | None = None,
    ) -> LocalPorts:
        """Choose and claim all ports: default ports that are free, else other free ports.

        Two clusters can thus share a host. Until `claims` is closed, other launchers choose none of
        these ports, many of which are bound seconds later. `reserved` is the port for clients, and
        `grpc` the one for those of gRPC. If `metrics` is given, it is the metrics port, even if it
        is not free. Raises StartError if another launcher has claimed one of these three.
        """
        given = {} if metrics is None else {"metrics": metrics}
        with ExitStack() as probe:  # no lasting claim: a server on another address may share it
            for_clients = [reserved] if grpc is None else [reserved, grpc]
            for port in for_clients:
                _claim_given_port(port, probe)
        for port in given.values():
            _claim_given_port(port, claims)
        taken = [*for_clients, *given.values()]
        # No port twice: `find_free_port` would replace the second by one of outgoing connections.
        inner = random.sample(_INNER_PORTS, len(_INNER_NAMES))
        preferred = dict(zip(_INNER_NAMES, inner, strict=True))
        chosen = {
            name: _claim_free_port(port, taken, claims)
            for name, port in (DEFAULT_PORTS | preferred).items()
            if name not in given
        }
        return cls(**chosen, **given)


def _claim_free_port(preferred: int, taken: list[int], claims: ExitStack) -> int:
    """Claim `preferred` or another free port. Add every port that was tried to `taken`."""
    while True:
        port = find_free_port(preferred, *taken)
        taken.append(port)
        if _claim_port(port, claims):
            return port


def _claim_given_port(port: int, claims: ExitStack) -> None:
    if not _claim_port(port, claims):
        raise StartError(
            f"port {port} belongs to another `hundredfold serve` on this host",
            hint="choose another port",
        )


def _claim_port(port: int, claims: ExitStack) -> bool:
    """Claim a port until `claims` is closed. Return False if another launcher has claimed it.

    The claim is the name of an abstract Unix socket. All users of a network namespace share these
    names, as they share its ports, even if each has a /tmp of its own. The kernel frees the names
    of a killed process. A host that refuses these names, as by AppArmor, has no claims.
    """
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"{CLAIM_PREFIX}{port}")
    except OSError as exc:
        return exc.errno != errno.EADDRINUSE
    return True


class ClientPorts(NamedTuple):
    """Ports for clients, which all listen on one address."""

    http: int
    grpc: int | None = None  # None: no gRPC


def choose_ports(
    host: str, clients: ClientPorts, metrics_host: str, metrics: int | None, claims: ExitStack
) -> LocalPorts:
    """Choose and claim all ports but those for clients, until `claims` is closed.

    Raises StartError if a given port cannot be used, or if another launcher has claimed it.
    """
    if metrics is not None and metrics in clients:
        raise StartError(
            f"`--metrics-port {metrics}` is the port for clients", hint="choose another port"
        )
    if clients.http == clients.grpc:
        raise StartError(
            f"`--grpc-port {clients.grpc}` is the port for HTTP", hint="choose another port"
        )
    # First the claims: they tell that another launcher, and not any process, has a port.
    ports = LocalPorts.choose(claims, reserved=clients.http, metrics=metrics, grpc=clients.grpc)
    check_port(host, clients.http, "--port")
    if clients.grpc is not None:
        check_port(host, clients.grpc, "--grpc-port")
    check_port(metrics_host, ports.metrics, "--metrics-port")
    return ports


def check_port(host: str, port: int, option: str) -> None:
    """Raise StartError, before processes start, if the server cannot listen on the port.

    If another process uses the port, the hint proposes another value for `option`.
    """
    if port not in PORTS:
        raise StartError(
            f"`{option} {port}` is not a port: use a number from {PORTS[0]} to {PORTS[-1]}"
        )
    try:
        free = is_port_free(host, port)
    except OSError as exc:
        raise StartError(f"cannot listen on {format_address(host, port)}: {exc.strerror}") from exc
    if not free:
        raise StartError(
            f"port {port} on {host} is in use by {describe_port_owner(port)}",
            hint=f"stop it, or choose another port: `hundredfold serve {option} {port + 1}`",
        )
