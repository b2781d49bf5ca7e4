"""Tests of the start of streams and of `finish_early`, which ends a stream early.

test_generation_streaming has the other tests of streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.config import IngressUserConfig
from deployments.errors import EngineFailed
from deployments.ingress.generation_stream import GenerationStream
from deployments.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationTimings,
    Started,
    Token,
)
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import wait_until
from tests.support.generation_harness import read_chunks
from tests.support.generators import ScriptedReply
from tests.unit.deployments.ingress.test_generation import GenerationHarness, build_request

HANGS = ScriptedReply(("a", "b", "c"), hangs=True)


async def test_finish_early_ends_completions_with_the_reason_length(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: HANGS)
    stream = await harness.pipeline.stream(build_request(choices=2))
    await wait_until(lambda: harness.generator.events_read == 2 * 4)
    parts = await stream.finish_early()
    texts = ["".join(p.chunk.text for p in parts if p.choice == choice) for choice in (0, 1)]
    assert texts == ["abc", "abc"]
    ends = [part.chunk.finished for part in parts if part.chunk.finished is not None]
    assert [(one.reason, one.generated_tokens) for one in ends] == [(FinishReason.LENGTH, 3)] * 2
    assert all(one.timings.decode_s > 0 for one in ends)
    assert harness.is_idle()
    (record,) = harness.recorder.records
    assert record.status == 200
    assert record.timings.tokens == 4 + 2 * 3
    await stream.aclose()
    assert harness.statuses == [200]


async def test_stream_starts_while_other_choices_wait_for_a_slot(writing_store: Path) -> None:
    replies = iter((HANGS, ScriptedReply(is_silent=True)))
    harness = GenerationHarness(writing_store, lambda call: next(replies))
    stream = await harness.pipeline.stream(build_request(choices=2))
    assert len(stream.started) == 2
    texts = []
    async for part in read_chunks(stream):
        texts.append((part.choice, part.chunk.text))
        if len(texts) == 3:
            break
    assert texts == [(0, "a"), (0, "b"), (0, "c")]
    ends = [part.chunk.finished for part in await stream.finish_early()]
    assert [end.generated_tokens for end in ends if end is not None] == [3, 0]
    assert harness.is_idle()


async def test_every_choice_has_its_own_start(writing_store: Path) -> None:
    async def speak(choice: int) -> AsyncGenerator[Started | Chunk, None]:
        yield Started(4, 0, choice, "cpu-fake", ())
        yield Chunk("", (), Finished(FinishReason.END, 0, GenerationTimings()))

    model = GenerationHarness(writing_store).pipeline.permitted.find(DECODER)
    stream = GenerationStream(model, lambda *_: None, max_buffered_tokens=20, choices_per_prompt=2)
    await stream.start([speak(choice) for choice in range(4)], lambda _: nullcontext())
    assert len([chunk async for chunk in read_chunks(stream)]) == 4
    assert [started.seed for started in stream.started] == [0, 1, 2, 3]


async def test_tokens_before_the_start_of_all_prompts_are_not_read_too_slowly(
    writing_store: Path,
) -> None:
    writes = ScriptedReply(("word",) * 20)
    waits = asyncio.Event()
    replies = iter((writes, ScriptedReply(waits_for=waits)))
    settings = IngressUserConfig(stream_buffer_tokens=5)
    harness = GenerationHarness(writing_store, lambda call: next(replies), settings)
    request = build_request(further_prompts=("two",))
    starting = asyncio.create_task(harness.pipeline.stream(request))
    await wait_until(lambda: harness.generator.events_read > 20)
    assert not starting.done()
    waits.set()
    stream = await starting
    parts = [part async for part in read_chunks(stream)]
    assert sum(len(part.chunk.tokens) for part in parts if part.choice == 0) == 21


async def test_many_tokens_at_once_do_not_fail_a_consumer_that_waits(writing_store: Path) -> None:
    go_on = asyncio.Event()

    async def speak(_choice: int) -> AsyncGenerator[Started | Chunk, None]:
        yield Started(4, 0, 7, "cpu-fake", ())
        await go_on.wait()
        for number in range(50):  # without a turn for other tasks
            yield Chunk("x", (Token(number, "x"),))
        yield Chunk("", (), Finished(FinishReason.END, 50, GenerationTimings()))

    statuses: list[int] = []
    model = GenerationHarness(writing_store).pipeline.permitted.find(DECODER)
    stream = GenerationStream(
        model, lambda _, status: statuses.append(status), max_buffered_tokens=20
    )
    await stream.start([speak(choice) for choice in range(4)], lambda _: nullcontext())
    reading = asyncio.ensure_future(anext(stream.batches()))
    await asyncio.sleep(0)
    go_on.set()
    read = await reading
    read += [chunk async for chunk in read_chunks(stream)]
    assert sum(len(one.chunk.tokens) for one in read) == 4 * 50
    assert statuses == [200]


async def test_tokens_that_were_read_do_not_count_as_unread(writing_store: Path) -> None:
    may_write: asyncio.Queue[None] = asyncio.Queue()

    async def speak() -> AsyncGenerator[Started | Chunk, None]:
        yield Started(4, 0, 7, "cpu-fake", ())
        while True:
            await may_write.get()
            for number in range(15):
                yield Chunk("x", (Token(number, "x"),))

    model = GenerationHarness(writing_store).pipeline.permitted.find(DECODER)
    stream = GenerationStream(model, lambda *_: None, max_buffered_tokens=20)
    await stream.start([speak()], lambda _: nullcontext())
    batches = stream.batches()
    for turn in range(1, 4):
        may_write.put_nowait(None)
        await wait_until(lambda turn=turn: stream.texts == ["x" * 15 * turn])  # reads nothing yet
        assert stream.failure is None
        assert len(await anext(batches)) == 15
    await stream.aclose()


async def test_finish_early_after_many_tokens_at_once_succeeds(writing_store: Path) -> None:
    """They come at once if the process stalls until the time limit of the request."""
    go_on = asyncio.Event()

    async def speak() -> AsyncGenerator[Started | Chunk, None]:
        yield Started(4, 0, 7, "cpu-fake", ())
        await go_on.wait()
        for number in range(50):  # without a turn for other tasks
            yield Chunk("x", (Token(number, "x"),))
        await asyncio.Event().wait()

    statuses: list[int] = []
    model = GenerationHarness(writing_store).pipeline.permitted.find(DECODER)
    stream = GenerationStream(
        model, lambda _, status: statuses.append(status), max_buffered_tokens=20
    )
    await stream.start([speak()], lambda _: nullcontext())
    reading = asyncio.ensure_future(anext(stream.batches()))
    await asyncio.sleep(0)
    go_on.set()
    reading.cancel()  # takes effect after the tokens have come
    await asyncio.gather(reading, return_exceptions=True)
    chunks = await stream.finish_early()
    assert sum(len(one.chunk.tokens) for one in chunks) == 50
    assert [one.reason for one in stream.finished] == [FinishReason.LENGTH]
    assert statuses == [200]


async def test_finish_early_after_the_end_has_no_effect(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    stream = await harness.pipeline.stream(build_request())
    await wait_until(lambda: len(stream.finished) == 1)
    parts = await stream.finish_early()
    (finished,) = [part.chunk.finished for part in parts if part.chunk.finished is not None]
    assert finished.reason is FinishReason.END
    assert await stream.finish_early() == []
    assert harness.statuses == [200]


async def test_finish_early_after_a_failure_raises_it(writing_store: Path) -> None:
    harness = GenerationHarness(
        writing_store, lambda call: ScriptedReply(breaks=EngineFailed("the engine failed"))
    )
    stream = await harness.pipeline.stream(build_request())
    await wait_until(harness.is_idle)
    with pytest.raises(EngineFailed):
        await stream.finish_early()
    await stream.aclose()
    assert harness.statuses == [500]
