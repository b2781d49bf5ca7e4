"""Removal of ended entries from a long queue: callers that have left, calls that have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from deployments.fair_queue import FairQueue

T = TypeVar("T")

# Minimum seconds between two searches of a queue. Thousands of callers may leave at once or one by
# one, and a search of a long queue takes milliseconds of the event loop.
CLEAN_INTERVAL_S = 0.05


class QueueCleaner(Generic[T]):
    """Searches of one queue for ended entries. Use from one event loop."""

    def __init__(self, queue: FairQueue[T], is_ended: Callable[[T], bool]) -> None:
        self._queue = queue
        self._is_ended = is_ended
        self._is_scheduled = False
        self._cleaned_s = 0.0  # loop time of the last search

    def schedule(self) -> None:
        """Search the queue once, CLEAN_INTERVAL_S after the last search or as soon as possible."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_at(self._cleaned_s + CLEAN_INTERVAL_S, self.clean)

    def clean(self) -> bool:
        """Search now if a search is scheduled, else return False."""
        if not self._is_scheduled:
            return False
        self._is_scheduled = False
        self._cleaned_s = asyncio.get_running_loop().time()
        self._queue.discard(self._is_ended)
        return True
