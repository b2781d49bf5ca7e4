"""Answers on their way: several streams merged into one, and freed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import NamedTuple

from deployments.errors import EngineFailed, ServeError
from deployments.generation.messages import (
    Chunk,
    Finished,
    FinishReason,
    GenerationTimings,
    Started,
)
from deployments.ingress.request_log import CLIENT_CLOSED_REQUEST
from deployments.registry import RegisteredModel

# Chunks that wait for a slow reader; the generators behind them wait too.
MAX_WAITING_CHUNKS = 64

Source = AsyncGenerator[Started | Chunk, None]
InTime = Callable[[int], AbstractAsyncContextManager[None]]


class ChoiceChunk(NamedTuple):
    """A chunk of one of the answers of a stream."""

    choice: int
    chunk: Chunk


class GenerationStream:
    """Answers on their way; closing it frees their slots. Iterating raises ServeError.

    Each answer has a task that reads it, so that a reader may leave at any moment. `on_end` is
    called once, with the HTTP status that the request ends with.
    """

    def __init__(self, model: RegisteredModel, on_end: Callable[[int], None]) -> None:
        self.model = model
        self.started: tuple[Started, ...] = ()  # one for each choice, once all have
        self.finished: list[Finished] = []  # so far, in the order in which they ended
        self._on_end = on_end
        self._begun: dict[int, Started] = {}
        self._begun_s = 0.0  # when all had, by time.perf_counter
        self._written: dict[int, int] = {}  # tokens of each answer that is not finished
        self._parts: list[ChoiceChunk] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._running = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def start(self, sources: Sequence[Source], in_time: InTime) -> None:
        """Read all `sources`, each in `in_time` of its number, until every one has started.

        Raises what one of them raises before; all are closed then.
        """
        self._running = len(sources)
        self._tasks = [
            asyncio.create_task(self._read(choice, source, in_time(choice)))
            for choice, source in enumerate(sources)
        ]
        for task in self._tasks:
            task.add_done_callback(self._read_one)
        try:
            while not self.started:
                await self._next_news()
        except BaseException:
            await self.aclose()
            raise

    async def batches(self) -> AsyncIterator[list[ChoiceChunk]]:
        """All parts that have come since the last look, as soon as there is one."""
        while True:
            if self._parts:
                parts, self._parts = self._parts, []
                self._room.set()
                yield parts
            elif self._ended and self._failure is None:
                return
            else:
                await self._next_news()

    async def __aiter__(self) -> AsyncIterator[ChoiceChunk]:
        """Every part, as it comes."""
        async for parts in self.batches():
            for part in parts:
                yield part

    async def finish_early(self) -> list[ChoiceChunk]:
        """End all answers where they stand, for their length; the parts not taken yet.

        The request is answered with that. Raises the stream's ServeError if it failed before.
        """
        if self._failure is not None:
            raise self._failure
        timings = GenerationTimings(decode_s=time.perf_counter() - self._begun_s)
        for choice, tokens in list(self._written.items()):
            self._keep(
                ChoiceChunk(choice, Chunk("", (), Finished(FinishReason.LENGTH, tokens, timings)))
            )
        parts, self._parts = self._parts, []
        await self._stop(200)
        return parts

    async def aclose(self) -> None:
        """Stop generating. Slots are freed even if waiting for that is cut short."""
        await self._stop(CLIENT_CLOSED_REQUEST)

    async def _stop(self, status: int) -> None:
        self._end(status)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next_news(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        await self._news.wait()

    async def _read(
        self, choice: int, source: Source, in_time: AbstractAsyncContextManager[None]
    ) -> None:
        async with aclosing(source), in_time:
            await self._keep_all(choice, source)

    def _read_one(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._fail(failure)
        elif self._running == 0:
            self._end(200)

    async def _keep_all(self, choice: int, source: Source) -> None:
        async for what in source:
            if isinstance(what, Started):
                self._begin_one(choice, what)
            else:
                await self._room.wait()
                self._keep(ChoiceChunk(choice, what))
                if what.finished is not None:
                    return
            self._news.set()
        raise EngineFailed("the generator's stream ended before its answer did")

    def _begin_one(self, choice: int, started: Started) -> None:
        self._begun[choice] = started
        self._written[choice] = 0
        if len(self._begun) == len(self._tasks):
            self.started = tuple(self._begun[one] for one in range(len(self._tasks)))
            self._begun_s = time.perf_counter()

    def _keep(self, part: ChoiceChunk) -> None:
        self._parts.append(part)
        if len(self._parts) >= MAX_WAITING_CHUNKS:
            self._room.clear()
        self._written[part.choice] += len(part.chunk.tokens)
        if part.chunk.finished is not None:
            self.finished.append(part.chunk.finished)
            del self._written[part.choice]
        self._news.set()

    def _fail(self, failure: BaseException) -> None:
        if self._ended:
            return
        self._failure = failure
        self._end(failure.status if isinstance(failure, ServeError) else 500)
        for task in self._tasks:
            task.cancel()

    def _end(self, status: int) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(status)
            self._news.set()
