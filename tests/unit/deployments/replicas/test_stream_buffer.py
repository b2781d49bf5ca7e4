from __future__ import annotations

import asyncio

import pytest

from deployments.errors import EngineFailed
from deployments.messages import Chunk, Finished, FinishReason, GenerationTimings, Started, Token
from deployments.replicas.generator import StreamBuffer
from tests.support.fakes import TIMEOUT_S

STARTED = Started(prompt_tokens=3, cached_tokens=0, seed=1, compute_type="cpu-fake")
DONE = Finished(FinishReason.LENGTH, 2, GenerationTimings())


def chunk(text: str, finished: Finished | None = None) -> Chunk:
    return Chunk(text, (Token(ord(text[0]), text),), finished)


async def test_stream_buffer_returns_events_in_order() -> None:
    buffer = StreamBuffer()
    buffer.put(STARTED)
    buffer.put(chunk("a"))
    assert await buffer.take() == STARTED
    assert await buffer.take() == chunk("a")


async def test_stream_buffer_merges_unread_chunks() -> None:
    buffer = StreamBuffer()
    for event in (STARTED, chunk("a"), chunk("b", DONE)):
        buffer.put(event)
    await buffer.take()
    assert await buffer.take() == Chunk("ab", (Token(97, "a"), Token(98, "b")), DONE)


async def test_stream_buffer_reader_waits_for_an_event() -> None:
    buffer = StreamBuffer()
    buffer.put(STARTED)
    await buffer.take()
    reader = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    assert not reader.done()
    buffer.put(chunk("a"))
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader == chunk("a")


async def test_stream_buffer_raises_an_error_after_written_chunks() -> None:
    buffer = StreamBuffer()
    for event in (STARTED, chunk("a"), EngineFailed("gone")):
        buffer.put(event)
    assert await buffer.take() == STARTED
    assert await buffer.take() == chunk("a")
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await buffer.take()
