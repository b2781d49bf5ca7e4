"""Bytes sent as they are, and the status that came back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.attack import CLOSED
from benchmarks.target import Target

MOST_ANSWER_BYTES = 64_000_000
NO_ANSWER = -1  # nothing came, and the connection stayed open


@dataclass(frozen=True, slots=True)
class Exchange:
    """What came back: CLOSED without an answer, NO_ANSWER when the wait was over first."""

    status: int
    head: bytes
    body: bytes


async def exchange(target: Target, raw: bytes, wait_s: float) -> Exchange:
    """Send a request that asks to close, and read to the end."""
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
        return Exchange(NO_ANSWER, b"", b"")
    except OSError:
        return Exchange(CLOSED, b"", b"")
    return parsed(received)


async def _send(writer: asyncio.StreamWriter, raw: bytes) -> None:
    """An early refusal breaks the connection under a long body; the answer tells why."""
    try:
        writer.write(raw)
        await writer.drain()
    except OSError:
        return


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the end, or until the connection breaks."""
    received = bytearray()
    try:
        while len(received) < MOST_ANSWER_BYTES and (chunk := await reader.read(1 << 20)):
            received += chunk
    except ConnectionResetError:
        return bytes(received)
    return bytes(received)


def parsed(received: bytes) -> Exchange:
    """Status, head and body of a whole answer."""
    head, _, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return Exchange(CLOSED, head, body)
    return Exchange(int(words[1]), head, body)
