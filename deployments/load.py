"""Meters of the load that a replica reports for autoscaling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from deployments.autoscaling import BUSY, QUEUED_S

# Each measurement multiplies the weight of all earlier ones by this factor. The last twenty
# measurements have most of the weight.
RATE_DECAY = 0.95


class Load(NamedTuple):
    busy: float  # share of the capacity in use since the last report, 0 to 1
    queued_s: float  # seconds that this replica needs for its waiting work

    @property
    def is_idle(self) -> bool:
        return not self.busy and not self.queued_s

    def to_metrics(self) -> dict[str, float]:
        return {BUSY: self.busy, QUEUED_S: self.queued_s}


class LoadMeter(Protocol):
    """A replica that measures its load."""

    def measure_load(self, backlog: int = 0) -> Load:
        """Return the load; `busy` is the mean since the previous call.

        `backlog` is the cost, in characters or tokens, of the calls that wait for this replica in
        other processes.
        """


class BusyMeter:
    """Share of a replica's capacity in use, averaged over the time between reports. Thread-safe.

    A sample at the time of a report would miss the forward passes between two reports.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure the share of `capacity`, the maximum number of calls that run at a time."""
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._busy_s = 0.0
        self._changed_s = self._taken_s = clock()

    def start(self) -> None:
        self._add(1)

    def end(self) -> None:
        self._add(-1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as one call that runs."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def take(self) -> float:
        """Return the mean share, 0 to 1, since the last `take`."""
        with self._lock:
            now_s = self._advance()
            elapsed_s, self._taken_s = now_s - self._taken_s, now_s
            busy_s, self._busy_s = self._busy_s, 0.0
        return min(busy_s / elapsed_s, 1.0) if elapsed_s > 0 else 0.0

    def _add(self, calls: int) -> None:
        with self._lock:
            self._advance()
            self._running += calls

    def _advance(self) -> float:
        now_s = self._clock()
        share = min(self._running, self._capacity) / self._capacity
        self._busy_s += share * (now_s - self._changed_s)
        self._changed_s = now_s
        return now_s


class WorkRate:
    """Measured seconds per unit of work, such as a token. The latest work weighs most."""

    def __init__(self, decay: float = RATE_DECAY) -> None:
        self._decay = decay
        self._units = 0.0
        self._seconds = 0.0

    def record(self, units: float, seconds: float) -> None:
        self._units = self._decay * self._units + units
        self._seconds = self._decay * self._seconds + seconds

    def predict_s(self, units: float) -> float:
        """Return the seconds that `units` take; 0 before the first measurement."""
        return units * self._seconds / self._units if self._units else 0.0
