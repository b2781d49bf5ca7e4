"""Latency of one forward pass by shape, for everything that can compute the rows of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.engine_figures import Latency, Shape
from benchmarks.measures import summarise
from deployments.messages import Batch, EncodedItem
from deployments.tuning.measure import batch_from, come_to_rest

# Passes per cell and round: enough for this much time, within these bounds.
CELL_S = 0.4
FEWEST_PASSES, MOST_PASSES = 3, 200

Forward = Callable[[Batch], object]  # one batch, whatever comes out of it


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender at one shape, and the median of each round so far."""

    contender: str
    forward: Forward
    shape: Shape
    batch: Batch
    medians_ms: list[float] = field(default_factory=list)

    def run_round(self) -> None:
        """Passes for about CELL_S seconds, after one that does not count.

        Before that the threads of whoever ran last come to rest: idle ones spin for a while.
        """
        come_to_rest()
        passes = min(max(round(CELL_S / self._pass_s()), FEWEST_PASSES), MOST_PASSES)
        self.medians_ms.append(float(np.median([self._pass_s() for _ in range(passes)])) * 1e3)

    def latency(self) -> Latency:
        """The summary of all rounds."""
        return Latency(self.contender, self.shape, summarise(self.medians_ms))

    def _pass_s(self) -> float:
        started_s = time.perf_counter()
        self.forward(self.batch)
        return time.perf_counter() - started_s


def make_cells(
    contenders: Mapping[str, Forward],
    shapes: Sequence[Shape],
    items: Sequence[EncodedItem],
    seed: int,
) -> list[Cell]:
    """Every contender at every shape, contenders next to each other.

    One batch per shape, without padding, of the tokens of `items`.
    """
    batches = {shape: batch_from(items, shape.padded, seed) for shape in shapes}
    return [
        Cell(name, forward, shape, batch)
        for shape, batch in batches.items()
        for name, forward in contenders.items()
    ]
