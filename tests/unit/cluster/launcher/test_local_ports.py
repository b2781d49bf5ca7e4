from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path

import pytest

from cluster.edge.haproxy_config import METRICS_HOST
from cluster.launcher.local_ports import ClientPorts, LocalPorts, choose_ports
from cluster.ports import open_listener
from cluster.start_errors import StartError
from tests.support.ipv6 import needs_ipv6
from tests.support.ports import free_port

PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture(autouse=True)
def own_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests in other processes may claim the same ports."""
    prefix = f"\0hundredfold-test-{os.getpid()}-"
    monkeypatch.setattr("cluster.launcher.local_ports.CLAIM_PREFIX", prefix)


@pytest.fixture
def claims() -> Iterator[ExitStack]:
    """The claims of chosen ports."""
    with ExitStack() as stack:
        yield stack


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_address_is_served(host: str, claims: ExitStack) -> None:
    port = free_port()
    assert choose_ports(host, ClientPorts(port), METRICS_HOST, None, claims).metrics != port
    with open_listener(host, port):
        with pytest.raises(StartError, match=f"port {port} on {host} is in use by pid "):
            choose_ports(host, ClientPorts(port), METRICS_HOST, None, claims)
        for address in ("::1", "127.0.0.1") if host == "::" else ("::1",):
            socket.create_connection((address, port), 5).close()


def test_port_of_another_launcher_is_named(claims: ExitStack) -> None:
    """Its processes must not be stopped, though `port` is in use by one of them."""
    other = LocalPorts.choose(claims, reserved=8000)
    with (
        open_listener("127.0.0.1", other.dashboard),
        ExitStack() as own,
        pytest.raises(StartError, match="belongs to another `hundredfold serve`") as refused,
    ):
        choose_ports("127.0.0.1", ClientPorts(other.dashboard), METRICS_HOST, None, own)
    assert refused.value.hint == "choose another port"


@pytest.mark.parametrize(
    ("host", "port", "metrics", "message"),
    [
        ("203.0.113.1", 8000, None, "cannot listen on 203.0.113.1:8000: "),
        ("fd00::203:113", 8000, None, r"cannot listen on \[fd00::203:113\]:8000: "),
        ("127.0.0.1", 70000, None, "`--port 70000` is not a port: use a number from 1 to 65535"),
        ("127.0.0.1", 0, None, "`--port 0` is not a port"),
        ("127.0.0.1", None, 70000, "`--metrics-port 70000` is not a port"),
        ("127.0.0.1", None, 0, "`--metrics-port 0` is not a port"),
        ("127.0.0.1", None, -1, "`--metrics-port -1` is not a port"),
        ("127.0.0.1", 8123, 8123, "`--metrics-port 8123` is the port for clients"),
    ],
)
def test_port_that_cannot_be_used_is_rejected(
    host: str, port: int | None, metrics: int | None, message: str, claims: ExitStack
) -> None:
    port = free_port() if port is None else port
    with pytest.raises(StartError, match=message):
        choose_ports(host, ClientPorts(port), METRICS_HOST, metrics, claims)


@pytest.mark.parametrize(
    ("grpc", "metrics", "message"),
    [
        (8123, None, "`--grpc-port 8123` is the port for HTTP"),
        (8124, 8124, "`--metrics-port 8124` is the port for clients"),
        (70000, None, "`--grpc-port 70000` is not a port"),
    ],
)
def test_port_for_grpc_that_cannot_be_used_is_rejected(
    grpc: int, metrics: int | None, message: str, claims: ExitStack
) -> None:
    with pytest.raises(StartError, match=message):
        choose_ports("127.0.0.1", ClientPorts(8123, grpc), METRICS_HOST, metrics, claims)


def test_port_for_grpc_in_use_is_named(claims: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        clients = ClientPorts(free_port(), other.getsockname()[1])
        with pytest.raises(StartError, match=f"port {clients.grpc} on 127.0.0.1 is in use") as it:
            choose_ports("127.0.0.1", clients, METRICS_HOST, None, claims)
    assert "--grpc-port" in it.value.hint


def test_no_other_port_is_the_one_for_grpc() -> None:
    with ExitStack() as claims:
        dashboard = LocalPorts.choose(claims, reserved=8000).dashboard
    with ExitStack() as claims:
        assert LocalPorts.choose(claims, reserved=8000, grpc=dashboard).dashboard != dashboard


def test_metrics_port_is_the_given_one() -> None:
    free = free_port()
    with ExitStack() as claims:
        assert LocalPorts.choose(claims, reserved=8000, metrics=free).metrics == free
        assert LocalPorts.choose(claims, reserved=8000).metrics != free


def test_inner_ports_are_not_those_of_well_known_servers() -> None:
    """Another server may want each of them. A restart must find them free again."""
    first, last = map(int, PORTS_OF_CONNECTIONS.read_text().split())
    with ExitStack() as claims:
        ports = LocalPorts.choose(claims, reserved=8400)
    inner = {ports.gcs, ports.raylet, ports.agent, ports.fallback_http, ports.fallback_grpc}
    assert inner <= set(range(20_000, 30_000))
    assert inner.isdisjoint(range(first, last + 1))


def test_inner_ports_are_different_ones_of_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is chosen twice would be replaced by one that any connection may use."""
    five = [free_port() for _ in range(5)]
    monkeypatch.setattr("cluster.launcher.local_ports._INNER_PORTS", five)
    for _ in range(5):
        with ExitStack() as claims:
            assert set(five) <= set(astuple(LocalPorts.choose(claims, reserved=8000)))


def test_given_port_that_another_server_has_chosen_is_refused() -> None:
    with ExitStack() as first, ExitStack() as second:
        chosen = LocalPorts.choose(first, reserved=8000)
        for given in ({"reserved": chosen.dashboard}, {"reserved": 8000, "metrics": chosen.gcs}):
            with pytest.raises(StartError, match="belongs to another `hundredfold serve`"):
                LocalPorts.choose(second, **given)


def test_host_without_abstract_sockets_has_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = socket.socket.bind

    def refuse(opened: socket.socket, address: str | tuple[str, int]) -> None:
        if isinstance(address, str):
            raise PermissionError(errno.EACCES, "Permission denied")
        bind(opened, address)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with ExitStack() as claims:
        assert len({8000, *astuple(LocalPorts.choose(claims, reserved=8000))}) == 9


def test_ports_of_a_run_differ() -> None:
    with ExitStack() as claims:
        chosen = astuple(LocalPorts.choose(claims, reserved=8000))
    for metrics in chosen:
        with ExitStack() as claims:
            ports = LocalPorts.choose(claims, reserved=8000, metrics=metrics)
        assert ports.metrics == metrics
        assert len({8000, *astuple(ports)}) == 9


def test_servers_that_start_together_choose_different_ports() -> None:
    """Many ports are bound only seconds after they are chosen."""
    with ExitStack() as first, ExitStack() as second:
        ports = [LocalPorts.choose(claims, reserved=8000) for claims in (first, second)]
    assert len({port for chosen in ports for port in astuple(chosen)}) == 16
