"""Streams of text-generation-inference's API, and the time limit `max_time`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from deployments.deadlines import deadline_after, enforce_deadline
from deployments.errors import DeadlineExceeded, ServeError
from deployments.ingress.apis.text_generation.requests import TGI_FIELD_NAMES, GenerateRequest
from deployments.ingress.apis.text_generation.responses import (
    FINISH_REASONS,
    build_tgi_error,
    build_token_details,
    build_top_tokens,
)
from deployments.ingress.apis.text_generation.schemas import StreamDetails, TokenEvent
from deployments.ingress.choices import combine_timings
from deployments.ingress.generation_stream import ChoiceChunk, GenerationStream
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.requests import GenerationRequest, GenerationResponse
from deployments.messages import Chunk, Completion, Finished, Started, Token, merge_chunks


@asynccontextmanager
async def enforce_max_time(deadline_s: float, description: str) -> AsyncIterator[None]:
    """Cancel the block at `deadline_s`, and raise DeadlineExceeded.

    The message of the error ends with `description`.
    """
    message = f"`parameters.max_time` ended {description}"
    try:
        async with enforce_deadline(deadline_s, message) as timeout:
            yield
    except DeadlineExceeded as error:
        if timeout.expired():
            error.field = "parameters.max_time"
        raise


async def start_stream_before(
    pipeline: RequestPipeline, generation_request: GenerationRequest, deadline_s: float
) -> GenerationStream:
    """Start a stream. Raises ServeError.

    The error is DeadlineExceeded if a prompt has no first token by `deadline_s`.
    """
    async with enforce_max_time(deadline_s, "before the first token"):
        return await pipeline.stream(generation_request)


async def read_batches_until(
    stream: GenerationStream, deadline_s: float
) -> AsyncIterator[list[ChoiceChunk]]:
    """Yield the batches of a stream.

    At `deadline_s`, end the unfinished sequences with the reason `length`.
    """
    batches = stream.batches()
    while True:
        try:
            async with enforce_deadline(deadline_s, "max_time") as timeout:
                batch = await anext(batches, None)
        except DeadlineExceeded:
            if not timeout.expired():
                raise
            break
        if batch is None:
            return
        yield batch
    if last := await stream.finish_early():
        yield last


async def complete_before(
    pipeline: RequestPipeline, generation_request: GenerationRequest, max_time_s: float
) -> GenerationResponse:
    """Generate for at most `max_time_s`, then return what was generated.

    Raises ServeError. The error is DeadlineExceeded if a prompt has no first token by then.
    """
    started_s = time.perf_counter()
    deadline_s = deadline_after(max_time_s)
    stream = await start_stream_before(pipeline, generation_request, deadline_s)
    try:
        parts = [part async for batch in read_batches_until(stream, deadline_s) for part in batch]
    finally:
        await stream.aclose()
    completions = tuple(
        merge_completion(started, [part.chunk for part in parts if part.choice == choice])
        for choice, started in enumerate(stream.started)
    )
    finished = [completion.finished for completion in completions]
    timings = combine_timings(stream.started, finished, generation_request.choices)
    return GenerationResponse(
        stream.model,
        completions,
        time.perf_counter() - started_s,
        timings=timings,
        fallback=stream.fallback,
    )


def merge_completion(started: Started, chunks: list[Chunk]) -> Completion:
    chunk = merge_chunks(chunks)
    if chunk.finished is None:
        raise AssertionError("bug: a stream ended without a finished chunk")
    return Completion(started, chunk.text, chunk.tokens, chunk.finished)


def encode_event(value: Any) -> bytes:
    """Encode an event as text-generation-inference does: no space after the colon."""
    return b"data:" + orjson.dumps(value) + b"\n\n"


def encode_error_event(error: ServeError) -> bytes:
    return encode_event(build_tgi_error(error)[1])


async def encode_events(
    batches: AsyncIterator[list[ChoiceChunk]], started: Started, tgi_request: GenerateRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the events of each batch as one piece of bytes.

    Raises ServeError with the field names of TGI.
    """
    builder = EventBuilder(started, tgi_request)
    with rename_error_fields(TGI_FIELD_NAMES):
        async for parts in batches:
            events = (event for part in parts for event in builder.build_events(part.chunk))
            if encoded := b"".join(map(encode_event, events)):
                yield encoded


class EventBuilder:
    """Builder of the events of one sequence. It collects the text for the last event."""

    def __init__(self, started: Started, tgi_request: GenerateRequest) -> None:
        self._started = started
        self._tgi_request = tgi_request
        self._texts: list[str] = []
        self._index = 0
        self._includes_top_tokens = bool(tgi_request.parameters.top_n_tokens)

    def build_events(self, chunk: Chunk) -> Iterator[TokenEvent]:
        """Yield an event per token. A last chunk without tokens gets an empty special token."""
        self._texts.append(chunk.text)
        tokens = chunk.tokens
        if chunk.finished is not None and not tokens:
            tokens = (Token(id=0, text="", logprob=0.0, special=True),)
        for index, token in enumerate(tokens):
            event = self._build_event(token)
            if chunk.finished is not None and index == len(tokens) - 1:
                self._add_details(event, chunk.finished)
            yield event

    def _build_event(self, token: Token) -> TokenEvent:
        self._index += 1
        event: TokenEvent = {
            "index": self._index,
            "token": build_token_details(token),
            "generated_text": None,
            "details": None,
        }
        if self._includes_top_tokens:
            event["top_tokens"] = build_top_tokens(token)
        return event

    def _add_details(self, last_event: TokenEvent, finished: Finished) -> None:
        (prompt,) = self._tgi_request.prompts
        text = "".join(self._texts)
        last_event["generated_text"] = self._tgi_request.format_text(prompt, text)
        last_event["details"] = StreamDetails(
            finish_reason=FINISH_REASONS[finished.reason],
            generated_tokens=finished.generated_tokens,
            input_length=self._started.prompt_tokens,
            seed=self._tgi_request.reported_seed(self._started),
        )
