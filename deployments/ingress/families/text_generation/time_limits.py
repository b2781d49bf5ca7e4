"""`max_time`: what was generated until then is the answer, as in transformers' pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import DeadlineExceeded
from deployments.generation.mailbox import joined
from deployments.generation.messages import Chunk, Completion, Started
from deployments.ingress.choices import timings_of
from deployments.ingress.generation import (
    GenerationQuestion,
    GenerationReply,
    GenerationService,
    GenerationStream,
    Part,
)


@asynccontextmanager
async def over_at(ends_s: float | None, when: str) -> AsyncIterator[None]:
    """Cancel the block, in which a generator is asked, at `ends_s` on the loop's clock.

    Raises DeadlineExceeded, which says `when` that was.
    """
    try:
        async with asyncio.timeout_at(ends_s) as limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        failure = DeadlineExceeded(
            f"`parameters.max_time` was over {when}", field="parameters.max_time"
        )
        failure.recorded = True  # as a question that was cancelled
        raise failure from exc


async def started_within(
    generation: GenerationService, question: GenerationQuestion, ends_s: float
) -> GenerationStream:
    """The stream, started before `ends_s` on the loop's clock.

    Raises DeadlineExceeded where nothing came until then, and what `stream` raises.
    """
    async with over_at(ends_s, "before anything was generated"):
        return await generation.stream(question)


async def batches_within(stream: GenerationStream, ends_s: float) -> AsyncIterator[list[Part]]:
    """The stream's parts; answers that are not done at `ends_s` end there, for their length."""
    batches = stream.batches()
    while True:
        try:
            async with asyncio.timeout_at(ends_s) as limit:
                batch = await anext(batches)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if not limit.expired():
                raise
            break
        yield batch
    if last := await stream.enough():
        yield last


async def complete_within(
    generation: GenerationService, question: GenerationQuestion, max_time_s: float
) -> GenerationReply:
    """The answers as far as they came in that time. Raises ServeError."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ends_s = began_s + max_time_s
    stream = await started_within(generation, question, ends_s)
    try:
        parts = [part async for batch in batches_within(stream, ends_s) for part in batch]
    finally:
        await stream.aclose()
    completions = tuple(
        completed(started, [part.chunk for part in parts if part.choice == choice])
        for choice, started in enumerate(stream.started)
    )
    ended = [one.finished for one in completions]
    timings = timings_of(stream.started, ended, question.choices)
    return GenerationReply(stream.model, completions, loop.time() - began_s, timings=timings)


def completed(started: Started, chunks: list[Chunk]) -> Completion:
    """The chunks of one answer in one piece."""
    whole = joined(chunks)
    if whole.finished is None:
        raise AssertionError("this is a bug: a stream ended without saying how")
    return Completion(started, whole.text, whole.tokens, whole.finished)
