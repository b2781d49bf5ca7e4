"""Open-loop load on a small server: times of sending, and checks against known answers."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
import pytest

from benchmarks.common.http import ServerAddress
from benchmarks.common.wire import CLOSED, HttpExchange, build_closing_post
from benchmarks.faults.load import (
    CUT,
    RIGHT,
    WRONG,
    KnownRequest,
    SteadyLoad,
    build_completion_body,
    classify_answer,
    learn_request,
)
from tests.support.fakes import wait_until


@dataclass
class SmallServer:
    """Server that sends `body`, if any, and closes the connection, once `may_answer` is set."""

    body: bytes = b"[1]"
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    received: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.received += 1
        await self.may_answer.wait()
        if self.body:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.body))
            writer.write(self.body)
        writer.close()


@asynccontextmanager
async def running(small: SmallServer) -> AsyncIterator[ServerAddress]:
    server = await asyncio.start_server(small.serve, "127.0.0.1", 0)
    async with server:
        yield ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])


REQUEST = KnownRequest("encoder", build_closing_post("/", b"{}"), lambda body: bool(body == [1]))


async def test_requests_are_sent_while_none_is_answered() -> None:
    small = SmallServer()
    async with running(small) as address:
        load = SteadyLoad(address)
        load.start([REQUEST], rate=500)
        await wait_until(lambda: small.received > 5)
        assert load.observations == []
        small.may_answer.set()
        await load.stop()
        assert len(load.observations) == small.received
        assert {one.outcome for one in load.observations} == {RIGHT}


@pytest.mark.parametrize(("body", "outcome"), [(b"[2]", WRONG), (b"", str(CLOSED))])
async def test_wrong_and_missing_answers_are_counted(body: bytes, outcome: str) -> None:
    small = SmallServer(body)
    small.may_answer.set()
    async with running(small) as address:
        load = SteadyLoad(address)
        load.start([REQUEST], rate=500)
        await wait_until(lambda: len(load.observations) > 1)
        await load.stop()
    assert {one.outcome for one in load.observations} == {outcome}


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (200, b"[1]", RIGHT),
        (200, b"[1", WRONG),
        (200, orjson.dumps({"error": "x"}), WRONG),
        (503, b"[1]", "503"),
    ],
)
def test_only_the_known_answer_is_right(status: int, body: bytes, outcome: str) -> None:
    assert classify_answer(REQUEST, HttpExchange(status, b"", body)) == outcome


@pytest.mark.parametrize(("status", "outcome"), [(200, CUT), (503, "503")])
def test_answer_that_ends_in_its_body_is_cut_not_wrong(status: int, outcome: str) -> None:
    answer = HttpExchange(status, b"HTTP/1.1 200 OK\r\nContent-Length: 100000", b"[0.125,0.2")
    assert classify_answer(REQUEST, answer) == outcome


async def test_right_answer_is_the_one_of_the_server() -> None:
    small = SmallServer()
    small.may_answer.set()
    async with running(small) as address:
        body = build_completion_body("model", "A prompt", 4)
        request = await learn_request(address, "encoder", "/path", body, operator.eq)
    assert request.raw.startswith(b"POST /path ")
    assert request.raw.endswith(body)
    answers = [HttpExchange(200, b"", text) for text in (b"[1]", b"[2]")]
    assert [classify_answer(request, each) for each in answers] == [RIGHT, WRONG]
