from __future__ import annotations

import asyncio
import os
import resource
import socket
from typing import Any

import pytest

from benchmarks.common.http import ServerAddress
from benchmarks.overload.open_loop import OpenLoopPlan, OpenLoopResult, run_open_loop
from tests.support.benchmark_fakes import FakeAnswer, FakeServer, ReceivedRequest
from tests.support.fakes import TIMEOUT_S
from tests.support.ports import free_port

TEXTS = [f"text {n}" for n in range(5)]


def plan(
    target: ServerAddress, *, rate: float = 100.0, drain_s: float = TIMEOUT_S, samples: int = 4
) -> OpenLoopPlan:
    requests = [target.build_post("/echo", text.encode()).decode("latin-1") for text in TEXTS]
    return OpenLoopPlan(
        host=target.host,
        port=target.port,
        requests=requests,
        rate=rate,
        seconds=0.5,
        drain_s=drain_s,
        seed=3,
        samples=samples,
    )


async def run(server: FakeServer, **how: Any) -> OpenLoopResult:
    return await asyncio.to_thread(run_open_loop, plan(server.target, **how))


async def test_every_request_has_an_exchange() -> None:
    async with FakeServer(lambda n, request: FakeAnswer(body=request.body)).running() as server:
        result = await run(server)
    assert len(result.exchanges) == len(server.requests)
    assert 20 < len(result.exchanges) < 100, "a Poisson process with a mean of 50"
    dues = [each.due_s for each in result.exchanges]
    assert dues == sorted(dues)
    for each in result.exchanges:
        assert each.status == 200
        assert each.ended_s is not None
        assert each.sent_s <= each.ended_s
    samples = [each for each in result.exchanges if each.body is not None]
    assert len(samples) == 4
    assert all(each.body == TEXTS[each.request] for each in samples)
    assert result.cpu_s > 0


async def test_samples_come_from_the_whole_loop() -> None:
    def answer(n: int, request: ReceivedRequest) -> FakeAnswer:
        return FakeAnswer(body=b"right" if n < 25 else b"wrong")

    async with FakeServer(answer).running() as server:
        result = await run(server, samples=15)
    bodies = [each.body for each in result.exchanges if each.body is not None]
    assert len(bodies) == 15
    assert set(bodies) == {"right", "wrong"}


async def test_arrivals_do_not_wait_for_answers() -> None:
    async with FakeServer(answers_from=20).running() as server:
        result = await run(server)
    assert server.connections >= 20
    assert all(each.status == 200 for each in result.exchanges)


async def test_connections_are_used_again() -> None:
    exchanges = 0
    async with FakeServer().running() as server:
        # A stalled machine sends all requests at once, each over a connection of its own.
        while server.connections == exchanges:
            exchanges += len((await run(server)).exchanges)
    assert server.connections < exchanges


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (FakeAnswer(status=429), 429),
        (FakeAnswer(hang_up=True), 0),
        (FakeAnswer(is_silent=True), 0),
        (FakeAnswer(raw=b"no HTTP"), 0),
    ],
)
async def test_failed_requests_are_recorded(answer: FakeAnswer, status: int) -> None:
    async with FakeServer(lambda n, request: answer).running() as server:
        result = await run(server, rate=20.0, drain_s=0.2 if answer.is_silent else TIMEOUT_S)
    assert {each.status for each in result.exchanges} == {status}
    assert all((each.ended_s is None) == (status == 0) for each in result.exchanges)


def test_refused_connections_are_recorded() -> None:
    result = run_open_loop(plan(ServerAddress("127.0.0.1", free_port()), rate=20.0))
    assert result.exchanges
    assert {(each.status, each.error) for each in result.exchanges} == {(0, "ECONNREFUSED")}


def test_the_soft_limit_of_open_files_does_not_limit_the_connections() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0), backlog=1_000) as silent:
        few = max(map(int, os.listdir("/proc/self/fd"))) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            target = ServerAddress("127.0.0.1", silent.getsockname()[1])
            result = run_open_loop(plan(target, rate=10.0 * few, drain_s=0.1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(result.exchanges) > few
    assert {each.error for each in result.exchanges} == {None}
