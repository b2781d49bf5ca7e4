"""Limits of HAProxy on slow and greedy clients, and lost replicas behind HAProxy."""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from cluster.edge.haproxy_config import ClientLimits
from cluster.edge.supervisor import EdgeSettings
from deployments.request_headers import ARRIVAL_HEADER, REFUSAL_HEADER
from tests.support.edge_harness import HOLD, EdgeHarness, run_harness
from tests.support.waiting import TIMEOUT_S, wait_for

HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
REPEATED = 10  # refusals of HAProxy that a test waits for
LIMITS = ClientLimits(connections=8, head_s=1.0, body_s=1.0)


@contextmanager
def run_edge(limits: ClientLimits, host: str = "127.0.0.1") -> Iterator[EdgeHarness]:
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-"))
        it = stack.enter_context(run_harness(Path(name), EdgeSettings(limits), host))
        it.start_manager()
        it.route(it.backend.port)
        yield it


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeHarness]:
    with run_edge(LIMITS) as it:
        yield it


def connect(edge: EdgeHarness, source: str = "127.0.0.1") -> socket.socket:
    """Connect from an address of the loopback network."""
    return socket.create_connection(("127.0.0.1", edge.port), 10, source_address=(source, 0))


def hold_request(edge: EdgeHarness, source: str = "127.0.0.1") -> socket.socket:
    """Send a request that runs until its connection closes; wait until a replica receives it."""
    seen = edge.backend.seen.count("/slow")
    peer = connect(edge, source)
    peer.sendall(HEAD.replace(b"/echo", b"/slow") + b"\r\ntext")
    wait_for(partial(has_seen_slow, edge, seen + 1))
    return peer


def send_short(edge: EdgeHarness, source: str) -> bytes:
    """Send a request that the replica answers at once; return the response."""
    with connect(edge, source) as peer:
        peer.sendall(HEAD.replace(b"host: x", b"host: x\r\nconnection: close") + b"\r\ntext")
        return read_all(peer)


def read_all(peer: socket.socket) -> bytes:
    received = b""
    while chunk := peer.recv(65_536):
        received += chunk
    return received


def has_seen_slow(edge: EdgeHarness, count: int) -> bool:
    return edge.backend.seen.count("/slow") >= count


def is_reset(edge: EdgeHarness, source: str = "127.0.0.1") -> bool:
    """Return whether HAProxy resets a new connection at once."""
    try:
        with connect(edge, source) as peer:
            peer.recv(1)
    except ConnectionResetError:
        return True
    return False


def is_accepted(edge: EdgeHarness) -> bool:
    """Return whether a request gets status 200. HAProxy may still reset its connection."""
    try:
        return edge.post().status_code == 200
    except httpx.TransportError:
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
        for _ in range(LIMITS.connections):
            stack.enter_context(hold_request(edge))
        assert is_reset(edge)
    wait_for(lambda: is_accepted(edge))


def test_client_cannot_evade_the_limits_by_http_2(edge: EdgeHarness) -> None:
    with connect(edge) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"HTTP/2 is not supported" in answer


def test_malformed_body_gets_a_json_error(edge: EdgeHarness) -> None:
    """HAProxy has its error files for a request whose head a replica has got already."""
    with connect(edge) as peer:
        seen = edge.backend.seen.count("/slow")
        peer.sendall(CHUNKED.replace(b"POST /echo", b"GET /slow") + b"\r\n")
        wait_for(partial(has_seen_slow, edge, seen + 1))
        peer.sendall(b"no size\r\n")
        head, _, body = read_all(peer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)
    assert error["code"] == "malformed_request"
    assert error["error"].startswith("the request is not valid HTTP/1.1")


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, b"GARBAGE"),
        (400, b"GET / HTTP/1.1\r\nhost: x\r\nno header"),
        (400, b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 16_000),
        (400, CHUNKED + b"\r\nno size"),
        (413, b"GET / HTTP/1.0\r\ncontent-length: 4"),
        (422, CHUNKED.replace(b"chunked", b"gzip, chunked")),
    ],
    ids=["garbage", "header", "long", "chunk", "body of HTTP/1.0", "encoding"],
)
def test_head_that_haproxy_cannot_parse_gets_a_page(
    edge: EdgeHarness, status: int, head: bytes
) -> None:
    """HAProxy 2.8 writes its own page before it looks for error files (docs/decisions/edge.md)."""
    with connect(edge) as peer:
        peer.sendall(head.removesuffix(b"\r\n") + b"\r\n\r\n")
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nContent-Type: text/html\r\n" in answer


def test_ipv4_clients_of_an_ipv6_listener_are_counted_by_address() -> None:
    loud, quiet = "127.0.0.1", "127.0.0.2"
    with run_edge(ClientLimits(connections=2), "::") as edge, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(hold_request(edge, loud))
        assert is_reset(edge, loud)
        assert send_short(edge, quiet).startswith(b"HTTP/1.1 200 ")


def test_requests_in_flight_are_limited_and_shared() -> None:
    """One address gets at most 3/4 of the limit. Refused requests do not reach a replica."""
    loud, quiet = "127.0.0.1", "127.0.0.2"
    with run_edge(ClientLimits(requests=4)) as edge:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(hold_request(edge, loud))
            refused = send_short(edge, loud)
            head, _, body = refused.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1" in head
            assert json.loads(body)["code"] == "overloaded"
            assert send_short(edge, quiet).startswith(b"HTTP/1.1 200 ")
            stack.enter_context(hold_request(edge, quiet))
            assert send_short(edge, quiet).startswith(b"HTTP/1.1 429 ")
            assert httpx.get(edge.url + "/health").status_code == 200
            assert edge.backend.seen.count("/echo") == 1
        wait_for(lambda: edge.post().status_code == 200)


def test_get_requests_take_no_place() -> None:
    with run_edge(ClientLimits(requests=2)) as edge, ExitStack() as stack:
        for count in range(3):
            peer = stack.enter_context(connect(edge))
            peer.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            wait_for(partial(has_seen_slow, edge, count + 1))
        assert edge.post().status_code == 200


def test_refusals_are_repeated_for_similar_requests_only() -> None:
    """Requests are similar if address, path and certain headers, such as the API key, are equal.

    HAProxy repeats a refusal only for similar requests. All other requests reach the replica.
    """
    with run_edge(ClientLimits(refusals=5)) as edge:
        replies = post_until_repeated(edge, "/full")
        assert {reply.status_code for reply in replies} == {429}
        assert not any(REFUSAL_HEADER in reply.headers for reply in replies)
        repeated = [reply for reply in replies if is_repeated(reply)]
        assert len(repeated) == len(replies) - edge.backend.seen.count("/full")
        assert edge.backend.seen.count("/full") >= 5
        assert {reply.json()["code"] for reply in repeated} == {"overloaded"}
        assert {reply.headers["retry-after"] for reply in replies} == {"7"}
        for headers in ({"authorization": "Bearer other"}, {"x-priority": "batch"}):
            assert edge.post("/full", headers=headers).text == "full"
        assert edge.post("/echo").status_code == 200
        wait_for(lambda: edge.post("/full").text == "full")


def test_time_that_is_left_to_calls_of_grpc_makes_them_no_other_kind() -> None:
    """Clients send it in microseconds. Calls with clearly other deadlines are of another kind."""
    with run_edge(ClientLimits(refusals=5)) as edge:
        left = itertools.cycle(range(4_999_000, 4_999_040))
        post_until_repeated(edge, "/full", ({"grpc-timeout": f"{left_us}u"} for left_us in left))
        for other in ("499900u", "8999000u", "4999000n"):
            assert edge.post("/full", headers={"grpc-timeout": other}).text == "full"


def test_refusals_limit_the_requests_in_flight_to_what_the_replica_accepts() -> None:
    """Each answer makes room for one more request, even directly after many refusals."""
    with run_edge(ClientLimits(refusals=5)) as edge, ThreadPoolExecutor(5) as pool:
        answers = edge.backend.answers
        accepted = fill_places(edge, pool)
        answers.release()
        wait_for(lambda: any(each.done() for each in accepted))
        accepted.append(pool.submit(edge.post, "/places"))
        answers.release(4)
        statuses = [each.result().status_code for each in accepted]
    assert statuses == [200] * 5


def test_limit_of_refused_requests_rises_with_answers() -> None:
    """After a second without refusals, HAProxy passes one more request, not all that wait.

    Each answer raises the limit by one with a probability of 1/4.
    """
    with run_edge(ClientLimits(refusals=5)) as edge, ThreadPoolExecutor(20) as pool:
        answers = edge.backend.answers
        held = fill_places(edge, pool)
        time.sleep(2.2)  # none of the refusals is in the last second any more
        edge.backend.places.release(100)
        held += [pool.submit(edge.post, "/places", HOLD) for _ in range(12)]
        wait_for(lambda: sum(each.done() for each in held) == 11)
        assert {each.result().status_code for each in held if each.done()} == {429}
        answers.release()
        wait_for(lambda: sum(each.done() for each in held) == 12)
        with httpx.Client(base_url=edge.url, timeout=20) as client:
            answered = {client.post("/places", content=b"text").status_code for _ in range(80)}
        assert answered == {200}
        held += [pool.submit(edge.post, "/places", HOLD) for _ in range(2)]
        answers.release(6)
        assert Counter(each.result().status_code for each in held) == {200: 7, 429: 11}


def fill_places(edge: EdgeHarness, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Send the four requests that `/places` accepts and holds, then many that are refused."""
    held = [pool.submit(edge.post, "/places", HOLD) for _ in range(4)]
    wait_for(lambda: edge.backend.seen.count("/places") == 4)
    replies = post_until_repeated(edge, "/places")
    assert {reply.status_code for reply in replies} == {429}
    return held


def post_until_repeated(
    edge: EdgeHarness, path: str, headers: Iterable[Mapping[str, str]] = itertools.repeat({})
) -> list[httpx.Response]:
    """Send requests that a replica refuses, until HAProxy has repeated some of the refusals.

    HAProxy counts refusals per second, so that on a slow host more of the requests reach the
    replica. They follow each other: of several at a time it would refuse some below the limit too.
    """
    replies: list[httpx.Response] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    with httpx.Client(base_url=edge.url, timeout=20) as client:
        for each in headers:
            replies.append(client.post(path, content=b"text", headers=each))
            if sum(map(is_repeated, replies)) == REPEATED:
                return replies
            assert time.monotonic() < deadline_s, f"HAProxy repeated few of {len(replies)} refusals"
    raise AssertionError("the headers have ended")


def is_repeated(reply: httpx.Response) -> bool:
    """Return whether HAProxy gave this refusal, and not the replica."""
    return reply.status_code == 429 and reply.text != "full"


def test_repeated_refusal_has_the_last_retry_after_of_its_kind() -> None:
    with run_edge(ClientLimits(refusals=5)) as edge:
        for kind, seconds in (("a", "12"), ("b", "110")):
            edge.backend.retry_after = seconds
            replies = post_until_repeated(edge, "/full", itertools.repeat({"x-api-key": kind}))
            repeated = [reply for reply in replies if is_repeated(reply)]
            assert {tuple(r.headers.get_list("retry-after")) for r in repeated} == {(seconds,)}


def test_refusals_for_other_reasons_are_not_counted() -> None:
    with run_edge(ClientLimits(refusals=5)) as edge:
        assert {edge.post("/limited").text for _ in range(30)} == {"limited"}


def test_replica_gets_the_time_of_arrival(edge: EdgeHarness) -> None:
    """Deadlines include the wait in sockets of a replica. Clients cannot set the arrival time."""
    before_s = time.time()
    edge.post(headers={ARRIVAL_HEADER: "1"})
    (arrived_ms,) = edge.backend.arrivals_ms[-1]
    assert before_s - 0.1 <= int(arrived_ms) / 1000 <= time.time()


def test_request_of_a_lost_replica_is_repeated(edge: EdgeHarness) -> None:
    reply = edge.post("/die-once")
    assert (reply.status_code, reply.text) == (200, "text")
    assert edge.backend.seen.count("/die-once") == 2


def test_lost_replica_gives_a_json_error(edge: EdgeHarness) -> None:
    reply = edge.post("/die")
    assert reply.status_code in (502, 503)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["code"] == "unavailable"
