"""What is to be reached, and whether it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One figure measured once per round: its median and how far the rounds lie apart."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]  # per round, in order

    @property
    def spread(self) -> float:
        """Distance of the extreme rounds as a share of the median; 0.05 means 5 %."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> RoundSummary:
    """The summary of one value per round; there must be at least one."""
    if not values:
        raise ValueError("no round was measured")
    return RoundSummary(float(np.median(values)), min(values), max(values), tuple(values))


def percentiles_ms(latencies_s: ArrayLike) -> dict[str, float]:
    """`p50` to `p99` in milliseconds of latencies in seconds; empty when nothing was answered."""
    seconds = np.asarray(latencies_s, dtype=np.float64)
    if not seconds.size:
        return {}
    found = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and its bound; `value` and `reached` are None where it was not measured."""

    what: str
    value: float | None
    bound: str  # such as "at least 5"
    reached: bool | None

    @classmethod
    def at_least(cls, what: str, value: float | None, least: float) -> Self:
        """Reached from `least` on."""
        reached = None if value is None else value >= least
        return cls(what, value, f"at least {least:g}", reached)

    @classmethod
    def at_most(cls, what: str, value: float | None, most: float) -> Self:
        """Reached up to `most`."""
        reached = None if value is None else value <= most
        return cls(what, value, f"at most {most:g}", reached)

    @property
    def sentence(self) -> str:
        """For people."""
        if self.value is None:
            return f"{self.what}: not measured, {self.bound}"
        return f"{self.what}: {self.value:.3f}, {self.bound}: {_WORDS[bool(self.reached)]}"


_WORDS = {True: "reached", False: "missed"}
