from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from deployments.capacity import Capacity
from deployments.config import CorsSettings
from deployments.errors import Overloaded, ServeError
from deployments.ingress.http.application import HttpApplication, ServerHooks
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.direct_requests import REQUEST_ID_HEADER, REQUEST_ID_KEY
from deployments.ingress.http.gate import AccessGate
from deployments.ingress.http.large_responses import CHUNK_BYTES, LargeResponseSender
from deployments.ingress.http.router import RouteTable
from deployments.request_headers import ADDRESS_HEADER
from tests.support.fakes import wait_until
from tests.support.operation_routes import build_route

SCOPE: Scope = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "query_string": b"",
}


@asynccontextmanager
async def no_lifespan() -> AsyncIterator[None]:
    yield


class LargeAnswerApp:
    """An HTTP application that answers with `body`, and a client of the application.

    The client stops reading after `stops_after` messages of an answer.
    """

    def __init__(self, body: bytes, limit: int = 1 << 20, write_timeout_s: float = 30.0) -> None:
        self.budget = Capacity(lambda: limit, "bytes of large answers")
        self.rejections: list[ServeError] = []
        self.address = ""  # of the client

        async def answer(request: Request) -> Response:
            return Response(body, headers={"x-test": "1"})

        self.app = HttpApplication(
            RouteTable([build_route("/", answer, "GET")]),
            AccessGate(),
            Cors(CorsSettings(origins=("https://page.example",))),
            Capacity(lambda: 1_000, "body bytes"),
            LargeResponseSender(self.budget, lambda: write_timeout_s),
            ServerHooks(
                lambda error, _seconds: self.rejections.append(error), no_lifespan, lambda: 0
            ),
        )

    async def get(self, stops_after: int | None = None) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            if len(sent) == stops_after:
                await asyncio.Event().wait()
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(ADDRESS_HEADER.encode(), self.address.encode())]
        await self.app({**SCOPE, "headers": headers, REQUEST_ID_KEY: b"id-7"}, receive, send)
        return sent


def body_of(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent[1:])


async def test_small_answer_is_one_message() -> None:
    server = LargeAnswerApp(b"x" * CHUNK_BYTES)
    sent = await server.get()
    assert len(sent) == 2
    assert server.budget.used == 0


async def test_large_answer_is_sent_in_chunks() -> None:
    body = bytes(range(256)) * 600
    server = LargeAnswerApp(body)
    sent = await server.get()
    assert [message["type"] for message in sent] == ["http.response.start"] + [
        "http.response.body"
    ] * 3
    assert max(len(message["body"]) for message in sent[1:]) == CHUNK_BYTES
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]
    assert body_of(sent) == body
    headers = dict(sent[0]["headers"])
    assert (headers[b"content-length"], headers[b"x-test"]) == (b"153600", b"1")
    assert server.budget.used == 0


async def test_unread_answers_count_and_further_ones_are_refused() -> None:
    server = LargeAnswerApp(b"x" * 400_000)
    unread = [asyncio.create_task(server.get(stops_after=2)) for _ in range(2)]
    await wait_until(lambda: server.budget.used == 800_000)
    sent = await server.get()
    assert sent[0]["status"] == 429
    headers = dict(sent[0]["headers"])
    assert b"retry-after" in headers
    assert headers[b"vary"] == b"origin"
    assert headers[REQUEST_ID_HEADER] == b"id-7"
    (rejection,) = server.rejections
    assert isinstance(rejection, Overloaded)
    for task in unread:
        task.cancel()
    await asyncio.gather(*unread, return_exceptions=True)
    assert server.budget.used == 0
    assert len(body_of(await server.get())) == 400_000


async def test_unread_answers_of_one_client_leave_room_for_those_of_others() -> None:
    server = LargeAnswerApp(b"x" * 300_000)
    server.address = "10.0.0.1"
    unread = asyncio.create_task(server.get(stops_after=2))
    await wait_until(lambda: server.budget.used == 300_000)
    assert (await server.get())[0]["status"] == 429
    server.address = "10.0.0.2"
    assert len(body_of(await server.get())) == 300_000
    unread.cancel()
    await asyncio.gather(unread, return_exceptions=True)
    assert server.budget.used == 0


async def test_answer_above_the_budget_is_sent_alone() -> None:
    server = LargeAnswerApp(b"x" * 400_000, limit=100_000)
    assert len(body_of(await server.get())) == 400_000
    assert server.budget.used == 0


async def test_answer_that_nobody_reads_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("deployments.ingress.http.large_responses.MIN_BYTES_PER_S", 1e9)
    server = LargeAnswerApp(b"x" * 400_000, write_timeout_s=0.01)
    sent: list[Message] = await server.get(stops_after=2)
    assert len(sent) == 2, "the rest is dropped, and the server closes the connection"
    assert server.budget.used == 0
