"""Completions of one request as they are generated: several streams merged into one.

Two settings of the Ingress limit slow readers. A stream fails when more than
`stream_buffer_tokens` tokens are unread. A connection is closed when its client reads nothing for
`stream_write_timeout_s` (http/sse.py). This module reads generators as fast as they send and
buffers the unread chunks itself. Otherwise Ray Serve would buffer them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import NamedTuple

from deployments.artifacts.types import Device
from deployments.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    EngineFailed,
    ServeError,
    forget_frames,
)
from deployments.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationTimings,
    Started,
    join_reasoning_and_text,
)
from deployments.registry import RegisteredModel

GenerationSource = AsyncGenerator[Started | Chunk, None]
WithTimeout = Callable[[int], AbstractAsyncContextManager[None]]


class ChoiceChunk(NamedTuple):
    """A chunk, and the index of its completion among all completions of the request."""

    choice: int
    chunk: Chunk


class GenerationStream:
    """Chunks of all completions. `batches` raises the first failure, `aclose` frees KV slots.

    Each completion has a task that reads its chunks, so that the consumer can stop at any moment.
    `on_end` is called once, with this stream and the final HTTP status of the request.
    """

    def __init__(
        self,
        model: RegisteredModel,
        on_end: Callable[[GenerationStream, int], None],
        *,
        max_buffered_tokens: int,
        choices_per_prompt: int = 1,
        fallback: Device | None = None,
    ) -> None:
        self.model = model
        self.fallback = fallback
        # Empty until every prompt has a started choice, then one element per choice. A choice that
        # still waits for a KV slot shares the element of its prompt's first started choice.
        self.started: tuple[Started, ...] = ()
        self.finished: list[Finished] = []  # in the order of their end
        self.texts: list[str] = []  # reasoning and text so far, by choice
        self.ended_early = False  # whether `finish_early` cut a completion
        self._on_end = on_end
        self._choices_per_prompt = choices_per_prompt
        self._started_choices: dict[int, Started] = {}
        self._started_prompts: dict[int, Started] = {}
        self._started_s = 0.0  # time.perf_counter when every prompt had started
        self._token_counts: dict[int, int] = {}  # tokens so far, by unfinished completion
        self._chunks: list[ChoiceChunk] = []
        self._buffered_tokens = 0
        self._max_buffered_tokens = max_buffered_tokens
        self._failure: BaseException | None = None
        self._ended = False
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_awaited = False  # whether the consumer waits, so that it takes the next chunks

    async def start(self, sources: Sequence[GenerationSource], with_timeout: WithTimeout) -> None:
        """Start to read all `sources`, source i inside `with_timeout(i)`.

        Return when every prompt has started, which means that one of its choices has started. Its
        other choices may still wait for a KV slot. If a source raises earlier, close all sources
        and raise its exception.
        """
        self._running = len(sources)
        self.texts = [""] * len(sources)
        self._token_counts = dict.fromkeys(range(len(sources)), 0)
        self._tasks = [
            asyncio.create_task(self._read(choice, source, with_timeout(choice)))
            for choice, source in enumerate(sources)
        ]
        for task in self._tasks:
            task.add_done_callback(self._end_source)
        try:
            while not self.started:
                await self._wait_for_change()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self.aclose()
            raise

    async def batches(self) -> AsyncIterator[list[ChoiceChunk]]:
        """Yield batches of chunks. A batch has all chunks since the last batch, at least one."""
        while True:
            if self._chunks:
                yield self._take_chunks()
            elif self._ended and self._failure is None:
                return
            else:
                await self._wait_for_change()

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the stream, if any."""
        return self._failure

    @property
    def unfinished(self) -> list[Finished]:
        """The unfinished completions as if they ended now, with the reason `length`.

        Empty until every prompt has started.
        """
        if not self.started:
            return []
        timings = GenerationTimings(decode_s=time.perf_counter() - self._started_s)
        return [
            Finished(FinishReason.LENGTH, tokens, timings) for tokens in self._token_counts.values()
        ]

    async def finish_early(self) -> list[ChoiceChunk]:
        """End unfinished completions with the reason `length`; return the remaining chunks.

        If the stream has failed already, raise its failure.
        """
        if self._failure is not None:
            raise self._failure
        self.ended_early = bool(self._token_counts)
        chunks = self._take_chunks()  # first: chunks that are read now fail no stream
        for choice, finished in zip(list(self._token_counts), self.unfinished, strict=True):
            self._add_chunk(ChoiceChunk(choice, Chunk("", (), finished)))
        chunks += self._take_chunks()
        await self._stop(200)
        return chunks

    async def aclose(self) -> None:
        """Stop generating. KV slots are freed even if this call is cancelled."""
        await self._stop(ClientDisconnected.status)

    async def _stop(self, status: int) -> None:
        self._end(status)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []  # through its traceback, a cancelled task refers to this stream

    async def _wait_for_change(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        self._is_awaited = True
        try:
            await self._changed.wait()
        finally:
            self._is_awaited = False

    async def _read(
        self, choice: int, source: GenerationSource, timeout: AbstractAsyncContextManager[None]
    ) -> None:
        async with aclosing(source), timeout:
            async for message in source:
                if isinstance(message, Started):
                    self._start_choice(choice, message)
                    continue
                self._add_chunk(ChoiceChunk(choice, message))
                if message.finished is not None:
                    return
        raise EngineFailed("the generator's stream ended without its last chunk")

    def _end_source(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._fail(failure)
        elif self._running == 0:
            self._end(200)

    def _start_choice(self, choice: int, started: Started) -> None:
        self._started_choices[choice] = started
        per_prompt, choices = self._choices_per_prompt, len(self._tasks)
        self._started_prompts.setdefault(choice // per_prompt, started)
        if len(self._started_prompts) * per_prompt < choices:
            return
        if not self.started:
            self._started_s = time.perf_counter()
            self._buffered_tokens = 0  # earlier tokens do not count: no client could read them
        self.started = tuple(
            self._started_choices.get(i, self._started_prompts[i // per_prompt])
            for i in range(choices)
        )
        self._changed.set()

    def _add_chunk(self, chunk: ChoiceChunk) -> None:
        self._chunks.append(chunk)
        self.texts[chunk.choice] += join_reasoning_and_text(chunk.chunk)
        tokens = len(chunk.chunk.tokens)
        self._token_counts[chunk.choice] += tokens
        self._buffered_tokens += tokens
        if chunk.chunk.finished is not None:
            self.finished.append(chunk.chunk.finished)
            del self._token_counts[chunk.choice]
        self._changed.set()
        # After a stall of this process, many chunks arrive before a waiting consumer can run.
        is_consumer_busy = self.started and not self._is_awaited
        if is_consumer_busy and self._buffered_tokens > self._max_buffered_tokens:
            self._fail(DeadlineExceeded("the client reads the stream too slowly"))

    def _take_chunks(self) -> list[ChoiceChunk]:
        chunks, self._chunks = self._chunks, []
        self._buffered_tokens = 0
        return chunks

    def _fail(self, failure: BaseException) -> None:
        if self._ended:
            forget_frames(failure)
            return
        self._failure = failure
        self._end(failure.status if isinstance(failure, ServeError) else 500)
        for task in self._tasks:
            task.cancel()

    def _end(self, status: int) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(self, status)
            self._changed.set()
