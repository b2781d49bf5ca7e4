from __future__ import annotations

import asyncio

import pytest
import uvloop

from benchmarks.common.agreement import extract_body
from benchmarks.common.http import ServerAddress
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from tests.support.benchmark_fakes import FakeAnswer, FakeServer
from tests.support.fakes import TIMEOUT_S
from tests.support.ports import free_port

TEXTS = [f"text {i}".encode() for i in range(7)]


def plan(connections: int = 4, *, seconds: float = 0.2, drain_s: float = TIMEOUT_S) -> LoadPlan:
    return LoadPlan(connections=connections, seconds=seconds, warm_up_s=0.05, drain_s=drain_s)


def workload(target: ServerAddress, sample: tuple[int, ...] = ()) -> Workload:
    return Workload([target.build_post("/echo", text) for text in TEXTS], sample)


async def measure(server: FakeServer, connections: int, *, answers: int = 1) -> LoadResult:
    """Run a load with at least `answers` answers in its window.

    A busy machine may answer nothing for a while, so the window grows until it is long enough.
    """
    seconds = 0.2
    while True:
        server.requests.clear()
        server.connections = 0
        load = plan(connections, seconds=seconds)
        result = await run_load(server.target, workload(server.target), load)
        if len(result.latencies_s) >= answers:
            return result
        seconds *= 2


async def test_run_load_counts_responses_in_the_window() -> None:
    async with FakeServer(delay_s=0.01).running() as server:
        result = await run_load(server.target, workload(server.target), plan(4))
    answered = len(result.latencies_s)
    # The window excludes the warm-up and the last request of each connection.
    assert answered <= len(server.requests) <= answered + 4 * 8
    assert result.requests_per_s == answered / 0.2
    assert result.failures == {}


async def test_run_load_is_a_closed_loop() -> None:
    async with FakeServer(delay_s=0.02).running() as server:
        result = await measure(server, 5)
    assert result.latencies_s.min() >= 0.02
    assert len(result.latencies_s) <= 5 * result.seconds / 0.02 + 5


async def test_run_load_keeps_connections_alive() -> None:
    async with FakeServer().running() as server:
        await measure(server, 3, answers=4)
    assert server.connections == 3


async def test_run_load_reopens_closed_connections() -> None:
    server = FakeServer(lambda n, request: FakeAnswer(keep_alive=False))
    async with server.running():
        result = await measure(server, 2, answers=3)
    assert result.failures == {}
    assert server.connections == len(server.requests)


async def test_run_load_sends_a_request_per_connection_in_the_shortest_window() -> None:
    shortest = LoadPlan(connections=2, seconds=1e-9, warm_up_s=0.0)
    async with FakeServer().running() as server:
        chosen = workload(server.target, sample=(0, 1))
        result = await run_load(server.target, chosen, shortest)
    assert result.failures == {}
    assert set(chosen.responses) == {0, 1}


async def test_run_load_counts_other_statuses_as_failures() -> None:
    def every_third_fails(n: int, request: object) -> FakeAnswer:
        return FakeAnswer(status=503 if n % 3 == 0 else 200)

    async with FakeServer(every_third_fails, delay_s=0.005).running() as server:
        result = await measure(server, 1)
    failed = sum(n % 3 == 0 for n in range(len(server.requests)))
    assert result.failures == {"503": failed}
    assert len(result.latencies_s) < len(server.requests) - failed + 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FakeAnswer(hang_up=True), "connection_lost"),
        (FakeAnswer(raw=b"SMTP 220\r\n\r\n"), "not_http"),
    ],
)
async def test_run_load_counts_lost_requests_as_failures(answer: FakeAnswer, reason: str) -> None:
    server = FakeServer(lambda n, request: answer if n == 2 else FakeAnswer(), delay_s=0.002)
    async with server.running():
        result = await measure(server, 1, answers=3)
    assert result.failures == {reason: 1}
    assert server.connections == 2


async def test_run_load_ends_without_responses() -> None:
    async with FakeServer(lambda n, request: FakeAnswer(is_silent=True)).running() as server:
        async with asyncio.timeout(TIMEOUT_S):
            result = await run_load(server.target, workload(server.target), plan(3, drain_s=0.3))
    assert result.failures == {"no_answer": 3}
    assert len(result.latencies_s) == 0


async def test_run_load_ends_without_server() -> None:
    target = ServerAddress("127.0.0.1", free_port())
    result = await run_load(target, workload(target), plan(2))
    assert set(result.failures) == {"not_connected"}
    assert result.requests_per_s == 0


async def test_workload_stores_the_first_responses_of_the_sample() -> None:
    def echo(n: int, request) -> FakeAnswer:
        return FakeAnswer(body=request.body + b" answered %d" % n)

    async with FakeServer(echo).running() as server:
        chosen = workload(server.target, sample=(1, 4))
        while len(chosen.responses) < 2:
            await run_load(server.target, chosen, plan(1))
    assert {i: extract_body(raw) for i, raw in chosen.responses.items()} == {
        1: b"text 1 answered 1",
        4: b"text 4 answered 4",
    }


async def test_workload_continues_across_phases() -> None:
    async with FakeServer(delay_s=0.01).running() as server:
        shared = workload(server.target)
        for _ in range(2):
            await run_load(server.target, shared, plan(1, seconds=0.05))
    bodies = [request.body for request in server.requests]
    assert shared.taken == len(bodies), "with warm-ups"
    assert bodies == [TEXTS[i % len(TEXTS)] for i in range(len(bodies))]


def test_run_load_supports_uvloop() -> None:
    async def count_answers() -> int:
        async with FakeServer().running() as server:
            result = await measure(server, 2)
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        assert result.failures == {}
        return len(result.latencies_s)

    assert uvloop.run(count_answers()) > 0
