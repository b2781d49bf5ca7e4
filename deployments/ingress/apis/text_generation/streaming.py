"""The events of a stream: one for each token, the last one with the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from deployments.errors import DeadlineExceeded, ServeError
from deployments.generation.messages import (
    Chunk,
    Completion,
    Finished,
    Started,
    Token,
    merge_chunks,
)
from deployments.ingress.apis.text_generation.requests import TGI_FIELD_NAMES, GenerateRequest
from deployments.ingress.apis.text_generation.responses import (
    FINISH_REASONS,
    build_tgi_error,
    build_token_details,
    build_top_tokens,
)
from deployments.ingress.apis.text_generation.schemas import StreamDetails, TokenEvent
from deployments.ingress.generation import (
    ChoiceChunk,
    GenerationRequest,
    GenerationResponse,
    GenerationService,
    GenerationStream,
    timings_of,
)
from deployments.ingress.http.errors import rename_error_fields


@asynccontextmanager
async def cancel_at(ends_s: float | None, when: str) -> AsyncIterator[None]:
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


async def start_stream_before(
    generation: GenerationService, question: GenerationRequest, ends_s: float
) -> GenerationStream:
    """The stream, started before `ends_s` on the loop's clock.

    Raises DeadlineExceeded where nothing came until then, and what `stream` raises.
    """
    async with cancel_at(ends_s, "before anything was generated"):
        return await generation.stream(question)


async def read_batches_until(
    stream: GenerationStream, ends_s: float
) -> AsyncIterator[list[ChoiceChunk]]:
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
    if last := await stream.finish_early():
        yield last


async def complete_before(
    generation: GenerationService, question: GenerationRequest, max_time_s: float
) -> GenerationResponse:
    """The answers as far as they came in that time. Raises ServeError."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ends_s = began_s + max_time_s
    stream = await start_stream_before(generation, question, ends_s)
    try:
        parts = [part async for batch in read_batches_until(stream, ends_s) for part in batch]
    finally:
        await stream.aclose()
    completions = tuple(
        merge_completion(started, [part.chunk for part in parts if part.choice == choice])
        for choice, started in enumerate(stream.started)
    )
    ended = [one.finished for one in completions]
    timings = timings_of(stream.started, ended, question.choices)
    return GenerationResponse(stream.model, completions, loop.time() - began_s, timings=timings)


def merge_completion(started: Started, chunks: list[Chunk]) -> Completion:
    """The chunks of one answer in one piece."""
    whole = merge_chunks(chunks)
    if whole.finished is None:
        raise AssertionError("this is a bug: a stream ended without saying how")
    return Completion(started, whole.text, whole.tokens, whole.finished)


def event(value: Any) -> bytes:
    """`value` as an event. There is no space behind the colon in this dialect."""
    return b"data:" + orjson.dumps(value) + b"\n\n"


def error_event(error: ServeError) -> bytes:
    """A failure in the middle of a stream."""
    return event(build_tgi_error(error)[1])


async def events_of(
    batches: AsyncIterator[list[ChoiceChunk]], started: Started, asked: GenerateRequest
) -> AsyncGenerator[bytes, None]:
    """The events of a stream of one answer. Raises ServeError in the words of the body."""
    writer = EventWriter(started, asked)
    with rename_error_fields(TGI_FIELD_NAMES):
        async for parts in batches:
            told = (event(one) for part in parts for one in writer.events(part.chunk))
            if body := b"".join(told):
                yield body


class EventWriter:
    """Counts the tokens and keeps the text of one answer."""

    def __init__(self, started: Started, asked: GenerateRequest) -> None:
        self._started = started
        self._asked = asked
        self._texts: list[str] = []
        self._index = 0
        self._tells_others = bool(asked.parameters.top_n_tokens)

    def events(self, chunk: Chunk) -> Iterator[TokenEvent]:
        """One for each token; a last chunk without any gets one that adds nothing."""
        self._texts.append(chunk.text)
        tokens = chunk.tokens
        if chunk.finished is not None and not tokens:
            tokens = (Token(id=0, text="", logprob=0.0, special=True),)
        last = len(tokens) - 1
        for place, token in enumerate(tokens):
            one = self._event(token)
            if chunk.finished is not None and place == last:
                self._finish(one, chunk.finished)
            yield one

    def _event(self, token: Token) -> TokenEvent:
        self._index += 1
        one: TokenEvent = {
            "index": self._index,
            "token": build_token_details(token),
            "generated_text": None,
            "details": None,
        }
        if self._tells_others:
            one["build_top_tokens"] = build_top_tokens(token)
        return one

    def _finish(self, last: TokenEvent, finished: Finished) -> None:
        (prompt,) = self._asked.prompts
        last["generated_text"] = self._asked.shown(prompt, "".join(self._texts))
        last["details"] = StreamDetails(
            finish_reason=FINISH_REASONS[finished.reason],
            generated_tokens=finished.generated_tokens,
            input_length=self._started.prompt_tokens,
            seed=self._asked.reported_seed(self._started),
        )
