"""Bytes sent as they are, and the status that came back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.http import ServerAddress

# The status of a connection that the server closed without an answer.
CLOSED = 0
REFUSED = frozenset({400, 404, 413, 415, 422, CLOSED})


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request; `stalls` when it ends in the middle and the connection stays open."""

    name: str
    raw: bytes
    statuses: frozenset[int]  # one of these is right
    stalls: bool = False


def request(
    method: str, path: str, body: bytes = b"", headers: Sequence[str] = (), *, length: str = ""
) -> bytes:
    """A request after which the server closes; `length` in place of the body's own."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        f"Content-Length: {length or len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST."""
    return request("POST", path, body, headers)


def chunked(path: str, chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A POST in chunks, written out."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + end


MOST_ANSWER_BYTES = 64_000_000
NO_ANSWER = -1  # nothing came, and the connection stayed open
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """What came back: CLOSED without an answer, NO_ANSWER when the wait was over first."""

    status: int
    head: bytes
    body: bytes


async def send_raw(target: ServerAddress, raw: bytes, wait_s: float) -> HttpExchange:
    """Send a request that asks to close, and read to the end of the answer."""
    received = b""
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            sending = asyncio.create_task(_send(writer, raw))
            try:
                received = await _receive(reader)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                writer.close()
    except TimeoutError:
        return HttpExchange(NO_ANSWER, b"", b"")
    except OSError:
        return HttpExchange(CLOSED, b"", b"")
    return parse_response(received)


async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
    """An early refusal breaks the connection under a long body; the answer tells why."""
    try:
        writer.write(raw)
        await writer.drain()
    except OSError:
        return


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the answer is whole, or until the connection ends or breaks."""
    received = bytearray()
    try:
        while len(received) < MOST_ANSWER_BYTES and (chunk := await reader.read(1 << 20)):
            received += chunk
            if is_whole(received):
                break
    except ConnectionResetError:
        return bytes(received)
    return bytes(received)


def is_whole(received: bytes | bytearray) -> bool:
    """Whether all of an answer is there that tells its length.

    Nobody closes the connection of a request that stalls, though it was answered long ago.
    """
    end = received.find(b"\r\n\r\n")
    told = CONTENT_LENGTH.search(received, 0, end + 2) if end >= 0 else None
    return told is not None and len(received) >= end + 4 + int(told[1])


def parse_response(received: bytes) -> HttpExchange:
    """Status, head and body of a whole answer."""
    head, _, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return HttpExchange(CLOSED, head, body)
    return HttpExchange(int(words[1]), head, body)
