"""Health of a worker: calls that hang, calls that keep failing, a lost engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.errors import EngineFailed, EngineLost

# A forward pass, a generation step and a tokenization call take seconds at most.
HANG_TIMEOUT_S = 60.0
# Consecutive failed calls after which the health check fails and Ray Serve replaces the replica.
# An engine that is lost for good raises the same errors as one that gets a bad input.
MAX_CONSECUTIVE_FAILURES = 10


class WorkerHealth:
    """Calls of one engine or thread, checked by the health check of its replica. Thread-safe."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._started_s: dict[int, float] = {}  # running calls, time.perf_counter
        self._numbers = itertools.count()
        self._failures = 0  # consecutive
        self._lost: EngineLost | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the duration of one call."""
        number = next(self._numbers)
        self._started_s[number] = time.perf_counter()
        try:
            yield
        finally:
            del self._started_s[number]

    def running_s(self) -> float:
        """Return the age of the oldest running call; 0 if none is running."""
        started_s = list(self._started_s.values())
        return time.perf_counter() - min(started_s) if started_s else 0.0

    def record_success(self) -> None:
        self._failures = 0

    def record_failure(self, error: Exception | None = None) -> None:
        """Count a failed call. After EngineLost the worker stays unhealthy."""
        self._failures += 1
        if isinstance(error, EngineLost):
            self._lost = error

    def check(self) -> None:
        """Raise EngineFailed if the replica must be replaced."""
        if self._lost is not None:
            raise EngineLost(self._lost.message)
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise EngineFailed(f"{self._subject}: the last {self._failures} calls failed")
        if (running_s := self.running_s()) > HANG_TIMEOUT_S:
            raise EngineFailed(
                f"{self._subject}: a call has run for {running_s:.0f} s; "
                f"the limit is {HANG_TIMEOUT_S:.0f} s"
            )
