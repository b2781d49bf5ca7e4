"""Threads that run the work of many clients in the order of a FairQueue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from deployments.fair_queue import FairQueue

T = TypeVar("T")

# Seconds between the first cancellation and the search of the queue for cancelled turns. Thousands
# of callers may leave at once or one by one, and a search of a long queue takes milliseconds of the
# event loop.
CLEAN_INTERVAL_S = 0.05


class FairThreads:
    """Threads that run one call each at a time. Use from one event loop."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._idle = count
        self._is_cleaning = False

    async def run(
        self, work: Callable[[], T], *, cost: float, client: str = "", priority: int = 0
    ) -> T:
        """Queue `work`, run it and return its result. Cancelling does not stop running work."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.push(turn, cost=cost, client=client, priority=priority)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._clean(loop)
            else:  # `_start_next` has reserved a thread
                self._end()
            raise
        running = self._threads.submit(work)
        # The thread is busy until the work ends, even if the caller is cancelled before.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end))
        return await asyncio.wrap_future(running)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` as soon as a thread is free, before all work that waits in the queue."""
        return self._threads.submit(work)

    def close(self) -> None:
        """Stop the threads after the work that they have already received. Blocks until then."""
        self._threads.shutdown()

    def _clean(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule one search of the queue that removes all cancelled turns."""
        if not self._is_cleaning:
            self._is_cleaning = True
            loop.call_later(CLEAN_INTERVAL_S, self._remove_cancelled)

    def _remove_cancelled(self) -> None:
        self._is_cleaning = False
        self._queue.discard(lambda turn: turn.cancelled())

    def _end(self) -> None:
        self._idle += 1
        self._start_next()

    def _start_next(self) -> None:
        while self._idle and self._queue:
            turn = self._queue.take_first()
            if not turn.done():
                self._idle -= 1
                turn.set_result(None)
