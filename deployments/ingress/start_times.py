"""Start times of the first replica of a deployment, from the reads of the status."""

from __future__ import annotations

from collections.abc import Mapping

# s: start of a process, imports, graphs. Until a start was seen.
ESTIMATED_START_S = 20.0


class StartTimes:
    """Starts by deployment, from the first read with a starting replica to one with a running one.

    A start is seen later than it begins, by the interval of the reads at most.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def note(self, starting: Mapping[str, int], running: Mapping[str, int], now_s: float) -> None:
        """Take what one read showed: replicas by deployment."""
        cold = {name for name in starting if not running.get(name)}
        for name in cold:
            self._since_s.setdefault(name, now_s)
        for name in self._since_s.keys() - cold:
            started_s = self._since_s.pop(name)
            if running.get(name):  # else its replicas failed
                self._seconds[name] = now_s - started_s

    def expect_s(self, deployment: str) -> float:
        return self._seconds.get(deployment, ESTIMATED_START_S)
