from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path

import pytest

from cluster.local import (
    WRAPPER,
    LocalPorts,
    find_haproxy,
    local_environment,
    ray_temp_environment,
)
from cluster.processes import find_free_port
from cluster.progress import StartError


def test_haproxy_is_found_where_the_wrapper_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_HAPROXY", raising=False)
    binary = find_haproxy()
    for name, value in local_environment().items():
        monkeypatch.setenv(name, value)
    assert os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(WRAPPER)
    assert find_haproxy() == binary
    assert local_environment()["HUNDREDFOLD_HAPROXY"] == binary


def test_sockets_of_a_node_are_short_enough() -> None:
    edge = Path("/tmp/hundredfold-1000-01234567")
    path = Path(local_environment(edge=edge)["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    assert len(str(path.parent / ("n" * 56) / path.name)) <= 107


def test_long_temporary_directory_is_replaced_for_ray() -> None:
    """Ray puts sockets into the temporary directory. Their paths have at most 107 bytes."""
    session = "ray/session_2026-11-27_18-47-29_123456_4194304/sockets/dash_TaskEventsHead"
    fits = "/" + "t" * (107 - len(session) - 2)
    assert len(f"{fits}/{session}") == 107
    assert ray_temp_environment({"TMPDIR": fits}) == {}
    assert ray_temp_environment({}) == {}
    assert ray_temp_environment({"TMPDIR": f"{fits}t"}) == {"RAY_TMPDIR": "/tmp"}
    assert ray_temp_environment({"TMPDIR": f"{fits}t", "RAY_TMPDIR": fits}) == {}
    with pytest.raises(StartError, match="has 33 bytes, the maximum is 32") as raised:
        ray_temp_environment({"RAY_TMPDIR": f"{fits}t"})
    assert "`/tmp`" in raised.value.hint


def test_metrics_port_is_the_given_one() -> None:
    free = find_free_port(9101, 0)
    assert LocalPorts.choose(reserved=8000, metrics=free).metrics == free
    assert LocalPorts.choose(reserved=9101).metrics != 9101


def test_ports_of_a_run_differ() -> None:
    for metrics in astuple(LocalPorts.choose(reserved=8000)):
        ports = LocalPorts.choose(reserved=8000, metrics=metrics)
        assert ports.metrics == metrics
        assert len({8000, *astuple(ports)}) == 9
