"""Estimate of the number of calls in the last minute."""

from __future__ import annotations

MINUTE_S = 60.0


class CallRate:
    """Estimate of the calls in the last 60 s, from counts of the current and the previous minute.

    The estimate assumes that the calls of the previous minute were spread evenly. If 20 s of that
    minute lie within the last 60 s, a third of its calls count.
    """

    __slots__ = ("_calls", "_former", "_started_s")

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._calls = 0
        self._former = 0

    def add(self, calls: int, now_s: float) -> None:
        self._turn(now_s)
        self._calls += calls

    def per_minute(self, now_s: float) -> float:
        self._turn(now_s)
        return self._calls + self._former * (1 - (now_s - self._started_s) / MINUTE_S)

    def _turn(self, now_s: float) -> None:
        minutes = (now_s - self._started_s) // MINUTE_S
        if minutes >= 1:
            self._former = self._calls if minutes == 1 else 0
            self._calls = 0
            self._started_s += minutes * MINUTE_S
