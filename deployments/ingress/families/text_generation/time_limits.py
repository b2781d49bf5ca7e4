"""`max_time`: what was generated until then is the answer, as in transformers' pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from deployments.errors import DeadlineExceeded
from deployments.generation.messages import Chunk, Completion, Started, Token
from deployments.ingress.choices import timings_of
from deployments.ingress.generation import (
    GenerationQuestion,
    GenerationReply,
    GenerationService,
    GenerationStream,
    Part,
)


async def started_within(
    generation: GenerationService, question: GenerationQuestion, ends_s: float
) -> GenerationStream:
    """The stream, started before `ends_s` on the loop's clock.

    Raises DeadlineExceeded where nothing came until then, and what `stream` raises.
    """
    try:
        async with asyncio.timeout_at(ends_s) as limit:
            return await generation.stream(question)
    except TimeoutError as exc:
        if not limit.expired():
            raise
        failure = DeadlineExceeded(
            "`parameters.max_time` was over before anything was generated",
            field="parameters.max_time",
        )
        failure.recorded = True  # as that of a stream that was cancelled
        raise failure from exc


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
        joined(started, [part.chunk for part in parts if part.choice == choice])
        for choice, started in enumerate(stream.started)
    )
    ended = [one.finished for one in completions]
    timings = timings_of(stream.started, ended, question.choices)
    return GenerationReply(stream.model, completions, loop.time() - began_s, timings=timings)


def joined(started: Started, chunks: Sequence[Chunk]) -> Completion:
    """The chunks of one answer in one piece."""
    tokens: list[Token] = []
    for chunk in chunks:
        tokens += chunk.tokens
    finished = chunks[-1].finished
    if finished is None:
        raise AssertionError("this is a bug: a stream ended without saying how")
    return Completion(started, "".join(chunk.text for chunk in chunks), tuple(tokens), finished)
