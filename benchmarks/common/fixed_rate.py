"""Open loop that sends requests at a fixed rate, as independent clients do."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from itertools import cycle
from typing import Any

from benchmarks.common.errors import BenchmarkError

SendRequest = Callable[[], Coroutine[Any, Any, None]]  # sends one request and stores its result


class FixedRateSender:
    """Sends requests at fixed times until `stop`, without waiting for earlier answers."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()  # requests whose result was lost, by exception
        self._senders: list[asyncio.Task[None]] = []
        self._requests: set[asyncio.Task[None]] = set()

    def start(self, requests: Iterable[SendRequest], rate: float) -> None:
        """Send `requests` in an endless cycle, `rate` of them per second, until `stop`."""
        sender = asyncio.create_task(self._send_all(requests, 1 / rate))
        sender.add_done_callback(self._count_failure)
        self._senders.append(sender)

    async def stop(self) -> None:
        """Send no more requests, and wait for the pending answers.

        Raises BenchmarkError if a request ended with an exception, since its result is missing. It
        does not replace an error that is handled now, so call it in a `finally` block, not in an
        `except` block.
        """
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await asyncio.gather(*self._requests, return_exceptions=True)
        # Since Python 3.12, `gather` does not wait for the callbacks of tasks that have ended.
        await asyncio.sleep(0)
        if self._failures and sys.exception() is None:
            counts = ", ".join(f"{count} with {error}" for error, count in self._failures.items())
            raise BenchmarkError(
                f"{self._failures.total()} requests of the load ended without a result: {counts}",
                hint="this is a bug of the benchmark",
            )

    async def _send_all(self, requests: Iterable[SendRequest], interval_s: float) -> None:
        next_s = time.perf_counter()
        for send in cycle(requests):
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            task = asyncio.create_task(send())
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            task.add_done_callback(self._count_failure)
            next_s += interval_s

    def _count_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures[repr(error)] += 1
