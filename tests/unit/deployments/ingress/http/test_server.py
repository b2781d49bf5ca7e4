from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from deployments.ingress.http.direct_requests import DirectRequests
from deployments.ingress.http.server import (
    MAX_HELD_BYTES,
    JoiningProtocol,
    JoiningTransport,
    configure_servers,
)

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class WriteLog:
    """Log of the parts of each write to the transport."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[list[bytes]] = []
        flush = JoiningTransport._flush

        def counting_flush(transport: JoiningTransport) -> None:
            if transport._held:
                self.writes.append(list(transport._held))
            flush(transport)

        monkeypatch.setattr(JoiningTransport, "_flush", counting_flush)


@asynccontextmanager
async def connected(
    bodies: Sequence[bytes],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a server whose response body is sent in the parts `bodies`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = str(sum(map(len, bodies))).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies, start=1):
            more = number < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    config = uvicorn.Config(app, http=JoiningProtocol, lifespan="off", log_config=None)
    async with listening(config) as streams:
        yield streams


@asynccontextmanager
async def listening(
    config: uvicorn.Config,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Start a server with the HTTP protocol of `config` and connect to it."""
    config.load()
    protocol = cast(type[HttpToolsProtocol], config.http_protocol_class)
    build = partial(protocol, config, ServerState(), {})
    loop = asyncio.get_running_loop()
    server = await loop.create_server(build, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()
        await writer.wait_closed()


async def read_body(reader: asyncio.StreamReader, size: int) -> bytes:
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(size)


async def test_head_and_body_leave_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    log = WriteLog(monkeypatch)
    async with connected([b"answer"]) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            assert await read_body(reader, 6) == b"answer"
    assert [len(write) for write in log.writes] == [2, 2, 2]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected([b"one", b" and two"]) as (reader, writer):
        writer.write(3 * REQUEST)
        for _ in range(3):
            assert await read_body(reader, 11) == b"one and two"


@pytest.mark.parametrize("bodies", [[b"answer"], [b""], [b"answer", b""]])
async def test_connection_is_closed_after_its_last_response(bodies: list[bytes]) -> None:
    async with connected(bodies) as (reader, writer):
        writer.write(REQUEST.replace(b"host: x", b"connection: close"))
        assert (await reader.read()).endswith(b"\r\n\r\n" + b"".join(bodies))


async def test_large_parts_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held parts could pile up, because only a write detects that a client reads slowly."""
    log = WriteLog(monkeypatch)
    parts = [bytes(MAX_HELD_BYTES)] * 4
    async with connected(parts) as (reader, writer):
        writer.write(REQUEST)
        await read_body(reader, 4 * MAX_HELD_BYTES)
    assert max(sum(map(len, write)) for write in log.writes) < 3 * MAX_HELD_BYTES


def answering(name: bytes) -> ASGIApp:
    """Build an application whose response body is `name`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(name)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": name})

    return app


@pytest.mark.parametrize("is_direct", [False, True])
async def test_servers_started_later_use_the_protocol(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """With DirectRequests, each request after the first skips the server's own application."""
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    direct = DirectRequests(answering(b"direct"))
    configure_servers(direct if is_direct else None)
    served = answering(b"served")
    config = uvicorn.Config(lambda: served, factory=True, lifespan="off", log_config=None)
    async with listening(config) as (reader, writer):
        bodies = []
        for _ in range(2):
            writer.write(REQUEST)
            bodies.append(await read_body(reader, 6))
    assert bodies == ([b"served", b"direct"] if is_direct else [b"served", b"served"])


GRPC_REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/grpc+proto\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "headers", "end"),
    [
        (GRPC_REQUEST, {"content-type": "application/grpc"}, b"0\r\ngrpc-status: 0\r\n\r\n"),
        (GRPC_REQUEST, {"content-type": "text/plain"}, b"0\r\n\r\n"),
        (GRPC_REQUEST, {"content-type": "application/grpc", "grpc-status": "5"}, b"0\r\n\r\n"),
        (REQUEST, {"content-type": "application/grpc"}, b"0\r\n\r\n"),
    ],
    ids=["message", "other type", "error", "not grpc"],
)
@pytest.mark.parametrize("parts", [[b"message"], [b"mes", b"sage"], [b"message", b""]])
async def test_message_of_grpc_ends_with_its_status(
    request_: bytes, headers: dict[str, str], end: bytes, parts: list[bytes]
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for number, part in enumerate(parts, start=1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    config = uvicorn.Config(app, http=JoiningProtocol, lifespan="off", log_config=None)
    async with listening(config) as (reader, writer):
        for _ in range(2):  # the second response on the connection has its own trailer
            writer.write(request_)
            await reader.readuntil(b"\r\n\r\n")
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            assert body == b"message"
            assert b"0\r\n" + await reader.readuntil(end[3:]) == end
