"""Many measurements to few figures. Pure functions of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure measured once per round: its median and how far the rounds lie apart."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]  # per round, in order

    @property
    def spread(self) -> float:
        """Distance of the extreme rounds as a share of the median; 0.05 means 5 %."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarise(values: Sequence[float]) -> Summary:
    """The summary of one value per round; there must be at least one."""
    if not values:
        raise ValueError("no round was measured")
    return Summary(float(np.median(values)), min(values), max(values), tuple(values))


def percentiles_ms(latencies_s: ArrayLike) -> dict[str, float]:
    """`p50` to `p99` in milliseconds of latencies in seconds; empty when nothing was answered."""
    seconds = np.asarray(latencies_s, dtype=np.float64)
    if not seconds.size:
        return {}
    found = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}
