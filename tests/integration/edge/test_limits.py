"""Slow and greedy clients, and replicas that end or hang, behind HAProxy."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cluster.edge.haproxy_config import ClientLimits
from tests.support.edge_harness import EdgeHarness, run_harness
from tests.support.ray_cluster import wait_for

HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
LIMITS = ClientLimits(connections=8, head_s=0.4, body_s=0.4)


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeHarness]:
    with tempfile.TemporaryDirectory(prefix="edge-") as name, run_harness(Path(name), LIMITS) as it:
        it.start_manager()
        it.route(it.backend.port)
        yield it


def connect(edge: EdgeHarness) -> socket.socket:
    return socket.create_connection(("127.0.0.1", edge.port), timeout=10)


def read_all(peer: socket.socket) -> bytes:
    received = b""
    while chunk := peer.recv(65_536):
        received += chunk
    return received


def has_seen_slow(edge: EdgeHarness, count: int) -> bool:
    return edge.backend.seen.count("/slow") >= count


def is_reset(edge: EdgeHarness) -> bool:
    """Whether HAProxy resets a new connection at once."""
    try:
        with connect(edge) as peer:
            peer.recv(1)
    except ConnectionResetError:
        return True
    return False


@pytest.mark.parametrize("sent", [b"POST /echo", HEAD, HEAD + b"\r\nab"])
def test_slow_request_gets_408_without_a_replica(edge: EdgeHarness, sent: bytes) -> None:
    seen = len(edge.backend.seen)
    with connect(edge) as peer:
        peer.sendall(sent)
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert len(edge.backend.seen) == seen


def test_idle_connection_is_closed(edge: EdgeHarness) -> None:
    with connect(edge) as peer:
        answer = read_all(peer)
    assert b" 200 " not in answer


def test_connections_of_one_address_are_limited(edge: EdgeHarness) -> None:
    with ExitStack() as stack:
        for number in range(1, LIMITS.connections + 1):
            held = stack.enter_context(connect(edge))
            held.sendall(HEAD.replace(b"/echo", b"/slow") + b"\r\ntext")
            wait_for(partial(has_seen_slow, edge, number), 5)
        assert is_reset(edge)
    wait_for(lambda: edge.post().status_code == 200, 5)


def test_request_of_a_lost_replica_is_repeated(edge: EdgeHarness) -> None:
    reply = edge.post("/die-once")
    assert (reply.status_code, reply.text) == (200, "text")
    assert edge.backend.seen.count("/die-once") == 2


def test_lost_replica_gives_a_json_error(edge: EdgeHarness) -> None:
    reply = edge.post("/die")
    assert reply.status_code in (502, 503)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["code"] == "unavailable"
