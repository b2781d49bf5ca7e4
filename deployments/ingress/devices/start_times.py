"""Cold start times: how long the first replica of each deployment took to start."""

from __future__ import annotations

from collections.abc import Mapping

# Assumed seconds of a start until a start is measured. In this time, the process starts, imports
# its modules and opens graphs.
ESTIMATED_START_S = 20.0


class StartTimes:
    """Start times by deployment, derived from periodic reads of the cluster status.

    A start lasts from the first read with a starting replica to the first read with a running
    replica. Each of these two reads is late by at most the interval between reads.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def note(self, starting: Mapping[str, int], running: Mapping[str, int], now_s: float) -> None:
        """Record a read at `now_s`: the numbers of starting and running replicas by deployment."""
        cold = {name for name in starting if not running.get(name)}
        for name in cold:
            self._since_s.setdefault(name, now_s)
        for name in self._since_s.keys() - cold:
            started_s = self._since_s.pop(name)
            if running.get(name):  # otherwise the start failed
                self._seconds[name] = now_s - started_s

    def expect_s(self, deployment: str) -> float:
        return self._seconds.get(deployment, ESTIMATED_START_S)
