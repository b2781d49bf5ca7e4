"""Servers that answer, are stopped, or have ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from cluster import liveness
from cluster.liveness import MAX_SILENT_PROBES, Liveness, answers
from cluster.processes import find_free_port


@pytest.fixture
def grpc_port() -> Iterator[int]:
    """The port of a gRPC server, as GCS and raylet have."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None)


@pytest.fixture
def stopped_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port whose connections wait in the backlog, as that of a stopped process."""
    monkeypatch.setattr(liveness, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_grpc_server_answers(grpc_port: int) -> None:
    assert answers(grpc_port)


def test_stopped_and_ended_servers_do_not_answer(stopped_port: int) -> None:
    assert not answers(stopped_port)
    assert not answers(find_free_port(1, 0))


def test_server_is_silent_after_some_probes_in_a_row(
    grpc_port: int, stopped_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "PERIOD_S", 0)
    watched = Liveness({"GCS": grpc_port, "the raylet": stopped_port})
    for _ in range(MAX_SILENT_PROBES - 1):
        assert watched.find_silent() is None
    assert watched.find_silent() == "the raylet"
    monkeypatch.setitem(watched._ports, "the raylet", grpc_port)
    assert watched.find_silent() is None
