"""Limit of events per second, with a count of those beyond it."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Limit of `max_per_s` events in each second of the clock. Not thread-safe."""

    def __init__(self, max_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_per_s = max_per_s
        self._clock = clock
        self._second = 0
        self._taken = 0  # number of events in this second
        self._omitted = 0  # number of events omitted since the last one within the limit

    def take(self) -> int | None:
        """Return the number of events omitted before this one; None to omit this one too."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._taken = second, 0
        if self._taken >= self._max_per_s:
            self._omitted += 1
            return None
        self._taken += 1
        omitted, self._omitted = self._omitted, 0
        return omitted
