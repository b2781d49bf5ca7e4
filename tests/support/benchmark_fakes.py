"""Scripted HTTP server for tests of benchmark clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import httptools

from benchmarks.common.http import ServerAddress
from tests.support.fakes import TIMEOUT_S


@dataclass(frozen=True)
class ReceivedRequest:
    method: str
    path: str
    body: bytes


@dataclass(frozen=True)
class FakeAnswer:
    """A scripted response, or a failure in place of one."""

    status: int = 200
    body: bytes = b"[[1.0]]"
    keep_alive: bool = True
    raw: bytes | None = None  # bytes to send instead of an HTTP response
    hang_up: bool = False  # close the connection without a response
    is_silent: bool = False  # send no response and keep the connection open

    def to_bytes(self) -> bytes:
        if self.raw is not None:
            return self.raw
        close = "" if self.keep_alive else "connection: close\r\n"
        head = f"HTTP/1.1 {self.status} Fake\r\ncontent-length: {len(self.body)}\r\n{close}\r\n"
        return head.encode() + self.body


Script = Callable[[int, ReceivedRequest], FakeAnswer]


@dataclass
class FakeServer:
    """Server that answers the n-th request with `script(n, request)`.

    n counts from 0 over all connections. No request is answered before `answers_from` of them
    have arrived.
    """

    script: Script = lambda n, request: FakeAnswer()
    delay_s: float = 0.0
    answers_from: int = 0
    connections: int = 0
    requests: list[ReceivedRequest] = field(default_factory=list)
    target: ServerAddress = field(default_factory=lambda: ServerAddress("127.0.0.1", 0))
    held: list[Callable[[], None]] = field(default_factory=list)  # answers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        """Listen on a free port of the loopback interface."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _FakeServerConnection(self), "127.0.0.1", 0)
        self.target = ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()

    @contextmanager
    def in_thread(self) -> Iterator[FakeServer]:
        """Run the server in a thread, for blocking clients."""
        started, stop = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            async with self.running():
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert started.wait(TIMEOUT_S)
        try:
            yield self
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join(TIMEOUT_S)


class _FakeServerConnection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""

    def connection_made(self, transport) -> None:
        self._server.connections += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        request = ReceivedRequest(
            self._parser.get_method().decode(), self._path.decode(), self._body
        )
        number = len(self._server.requests)
        self._server.requests.append(request)
        answer = self._server.script(number, request)
        held = self._server.held
        held.append(partial(self._answer, answer))
        if number + 1 >= self._server.answers_from:
            for send in held:
                asyncio.get_running_loop().call_later(self._server.delay_s, send)
            held.clear()

    def _answer(self, answer: FakeAnswer) -> None:
        if answer.is_silent:
            return
        if not answer.hang_up:
            self._transport.write(answer.to_bytes())
        if answer.hang_up or not answer.keep_alive:
            self._transport.close()
