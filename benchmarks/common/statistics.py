"""Summaries over rounds, percentiles of latencies, and goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.common.errors import BenchmarkError

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """Median, minimum and maximum of a value that is measured once per round."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]  # one value per round, in order

    @property
    def spread(self) -> float:
        """(high - low) / median; 0.05 means 5 %."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> RoundSummary:
    """Summarize one value per round. Raise ValueError if there is no round."""
    if not values:
        raise ValueError("no round was measured")
    return RoundSummary(float(np.median(values)), min(values), max(values), tuple(values))


def summarize_ratios(left: RoundSummary, right: RoundSummary) -> RoundSummary:
    """Summarize left / right within each round, because the speed of a machine drifts."""
    return summarize([a / b for a, b in zip(left.values, right.values, strict=True)])


def percentiles_ms(latencies_s: ArrayLike) -> dict[str, float]:
    """Return `p50` to `p99` in milliseconds from latencies in seconds; empty without latencies."""
    seconds = np.asarray(latencies_s, dtype=np.float64)
    if not seconds.size:
        return {}
    values = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, values, strict=True)}


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured value and its bound. Without a measurement `value` and `reached` are None."""

    what: str
    value: float | None
    bound: str  # text of the bound, such as "at least 5"
    reached: bool | None

    @classmethod
    def at_least(cls, what: str, value: float | None, minimum: float) -> Self:
        reached = None if value is None else value >= minimum
        return cls(what, value, f"at least {minimum:g}", reached)

    @classmethod
    def at_most(cls, what: str, value: float | None, maximum: float) -> Self:
        reached = None if value is None else value <= maximum
        return cls(what, value, f"at most {maximum:g}", reached)

    @property
    def sentence(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured, {self.bound}"
        result = "reached" if self.reached else "missed"
        return f"{self.what}: {self.value:.3f}, {self.bound}: {result}"


def require_goals(goals: Iterable[Goal], *, hint: str) -> None:
    """Raise BenchmarkError with the goals that are missed or not measured.

    Call it after the results are written, because they explain the failure.
    """
    if missed := [goal.sentence for goal in goals if not goal.reached]:
        raise BenchmarkError("; ".join(missed), hint=hint)
