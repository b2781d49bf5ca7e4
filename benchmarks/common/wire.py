"""Raw HTTP requests, and the status and body of their responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress

# Status of a connection that the server refuses, or closes without a valid response.
CLOSED = 0


def build_request(
    method: str, path: str, body: bytes = b"", headers: Sequence[str] = (), *, length: str = ""
) -> bytes:
    """Build a request with `Connection: close`. `length` replaces the true Content-Length."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        f"Content-Length: {length or len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def build_closing_post(path: str, body: bytes, *headers: str) -> bytes:
    """Build a POST request with `Connection: close`. `path` includes the prefix of the server."""
    return build_request("POST", path, body, headers)


def build_chunked_post(path: str, chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Build a POST request. Its body is `chunks`, which the caller has encoded, then `end`."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + end


MAX_RESPONSE_BYTES = 64_000_000
NO_ANSWER = -1  # status after a timeout while the connection is open
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """A response. `status` is NO_ANSWER after a timeout, and CLOSED without a valid response."""

    status: int
    head: bytes
    body: bytes

    @property
    def is_cut(self) -> bool:
        """Whether the body is shorter than its Content-Length; False without this header."""
        length = CONTENT_LENGTH.search(self.head)
        return length is not None and len(self.body) < int(length[1])


def require_ok(answer: HttpExchange, request: str, *, hint: str) -> bytes:
    """Return the body of a response. Raises BenchmarkError for a status other than 200.

    `request` names the request in the error.
    """
    if answer.status != 200:
        raise BenchmarkError(
            f"{request} returned {answer.status}: {answer.body[:300]!r}", hint=hint
        )
    return answer.body


async def send_raw(target: ServerAddress, raw: bytes, timeout_s: float) -> HttpExchange:
    """Send a raw request and read its response to the end, or up to MAX_RESPONSE_BYTES.

    A failed connection or a timeout raises no error. The status of the result reports it.
    """
    received = b""
    try:
        async with asyncio.timeout(timeout_s):
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
    """Send a request. Ignore errors: the server may reject a request before it reads the body."""
    try:
        writer.write(raw)
        await writer.drain()
    except OSError:
        return


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """Read until the response is complete or the connection ends."""
    received = bytearray()
    try:
        while len(received) < MAX_RESPONSE_BYTES and (chunk := await reader.read(1 << 20)):
            received += chunk
            if is_complete(received):
                break
    except ConnectionResetError:
        return bytes(received)
    return bytes(received)


def is_complete(received: bytes | bytearray) -> bool:
    """Return whether a response with a Content-Length is complete; False without this header.

    The reader cannot wait for the end of the connection, because the server keeps the connection
    open after an incomplete request.
    """
    end = received.find(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(received, 0, end + 2) if end >= 0 else None
    return length is not None and len(received) >= end + 4 + int(length[1])


def parse_response(received: bytes) -> HttpExchange:
    head, end, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not end or len(words) < 2 or not words[1].isdigit():
        return HttpExchange(CLOSED, head, body)
    return HttpExchange(int(words[1]), head, body)
