"""Threads that run the work of many clients in the order of a FairQueue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from deployments.errors import Overloaded
from deployments.fair_queue import FairQueue
from deployments.queue_cleaner import QueueCleaner

T = TypeVar("T")


class FairThreads:
    """Threads that run one call each at a time. Use from one event loop."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._cleaner = QueueCleaner(self._queue, lambda turn: turn.done())
        self._idle = count
        self._is_closed = False

    async def run(
        self, work: Callable[[], T], *, cost: float, client: str = "", priority: int = 0
    ) -> T:
        """Queue `work`, run it and return its result. Cancelling does not stop running work.

        Raises Overloaded if the threads are closed before the work starts.
        """
        if self._is_closed:
            raise _build_refusal()
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.push(turn, cost=cost, client=client, priority=priority)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._cleaner.schedule()
            else:  # `_start_next` has reserved a thread
                self._end()
            raise
        if self._is_closed:  # between the assignment of the thread and now
            raise _build_refusal()
        running = self._threads.submit(work)
        # The thread is busy until the work ends, even if the caller is cancelled before.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end))
        return await asyncio.wrap_future(running)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` as soon as a thread is free, before all work that waits in the queue."""
        return self._threads.submit(work)

    async def close(self) -> None:
        """Refuse queued and new work, and wait for the end of the work that threads have received.

        The callers of refused work get Overloaded.
        """
        self._is_closed = True
        for turn in self._queue.discard(lambda _: True):
            if not turn.done():
                turn.set_exception(_build_refusal())
        # Not on the event loop, which must deliver the results of the running work meanwhile.
        await asyncio.to_thread(self._threads.shutdown)

    def _end(self) -> None:
        self._idle += 1
        self._start_next()

    def _start_next(self) -> None:
        while self._idle and self._queue:
            turn = self._queue.take_first()
            if not turn.done():
                self._idle -= 1
                turn.set_result(None)


def _build_refusal() -> Overloaded:
    return Overloaded("this replica is stopping; retry")
