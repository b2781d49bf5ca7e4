from __future__ import annotations

import asyncio

import pytest

from deployments.errors import EngineFailed
from deployments.generation.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationTimings,
    Started,
    Token,
)
from deployments.replicas.generator import StreamBuffer
from tests.support.fakes import TIMEOUT_S

STARTED = Started(prompt_tokens=3, cached_tokens=0, seed=1, compute_type="cpu-fake")
DONE = Finished(FinishReason.LENGTH, 2, GenerationTimings())


def chunk(text: str, finished: Finished | None = None) -> Chunk:
    return Chunk(text, (Token(ord(text[0]), text),), finished)


async def test_news_come_in_order() -> None:
    mailbox = StreamBuffer(10)
    mailbox.put(STARTED)
    mailbox.put(chunk("a"))
    assert await mailbox.take() == STARTED
    assert await mailbox.take() == chunk("a")


async def test_chunks_that_nobody_took_become_one() -> None:
    mailbox = StreamBuffer(10)
    for what in (STARTED, chunk("a"), chunk("b", DONE)):
        mailbox.put(what)
    await mailbox.take()
    assert await mailbox.take() == Chunk("ab", (Token(97, "a"), Token(98, "b")), DONE)


async def test_a_reader_waits_for_news() -> None:
    mailbox = StreamBuffer(10)
    mailbox.put(STARTED)
    await mailbox.take()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    mailbox.put(chunk("a"))
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader == chunk("a")


async def test_an_error_comes_after_all_that_was_written() -> None:
    mailbox = StreamBuffer(10)
    for what in (STARTED, chunk("a"), EngineFailed("gone")):
        mailbox.put(what)
    assert await mailbox.take() == STARTED
    assert await mailbox.take() == chunk("a")
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await mailbox.take()


async def test_a_reader_that_is_too_far_behind_makes_it_full() -> None:
    mailbox = StreamBuffer(2)
    for text in "ab":
        mailbox.put(chunk(text))
    assert not mailbox.is_full
    mailbox.put(chunk("c"))
    assert mailbox.is_full
    await mailbox.take()
    assert not mailbox.is_full
