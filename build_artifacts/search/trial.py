"""A short contest of all graphs of a device, before any of them is judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import exp, log

from pydantic import BaseModel, ConfigDict

from deployments.config import LaneSettings
from deployments.engines import GraphSpec, open_engine
from deployments.errors import EngineFailed
from deployments.messages import Batch, EncodedItem
from deployments.tuning.costs import Shape
from deployments.tuning.measure import batches_from
from deployments.tuning.tuner import Contender, Contest, measure_together

_SHAPES = (
    Shape(items=1, tokens=16),
    Shape(items=1, tokens=128),
    Shape(items=8, tokens=64),
    Shape(items=8, tokens=128),
)
_SECONDS = 25.0


class Trial(BaseModel):
    """Milliseconds of each graph at each shape of the trial, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    times_ms: dict[str, tuple[float, ...]]  # of equal length

    def mean_ms(self, name: str) -> float:
        """Geometric mean over the shapes: a factor counts the same at every length."""
        times = self.times_ms[name]
        return exp(sum(map(log, times)) / len(times))

    def order(self) -> list[str]:
        """Who is fastest at some shape first, then the others; each by the mean."""
        fastest = self.fastest()
        return sorted(self.times_ms, key=lambda name: (name not in fastest, self.mean_ms(name)))

    def fastest(self) -> set[str]:
        """The names that win at some shape."""
        columns = zip(*self.times_ms.values(), strict=True)
        names = list(self.times_ms)
        return {names[column.index(min(column))] for column in columns}

    def describe(self) -> str:
        """The means, in the order."""
        return ", ".join(f"{name} {self.mean_ms(name):.2f} ms" for name in self.order())


def hold_trial(
    specs: Mapping[str, GraphSpec],
    lane: LaneSettings,
    items: Sequence[EncodedItem],
    max_tokens: int,
) -> Trial:
    """The trial of `specs` by name, all of one device.

    Graphs that do not run on `lane` are left out, and so are those that there is no memory for
    beside the ones before them. Raises EngineFailed when there is none for the first.
    """
    cut = (s.model_copy(update={"tokens": min(s.tokens, max_tokens)}) for s in _SHAPES)
    shapes = tuple(dict.fromkeys(cut))
    smallest = batches_from(items, shapes[0])[0]
    # Looked at alone first: what does not run must not take the room of what does.
    contenders = [
        Contender.of(name, spec) for name, spec in specs.items() if _works(spec, lane, smallest)
    ]
    contest = Contest(lane=lane, shapes=shapes, items=items, seconds=_SECONDS)
    rows = measure_together(contenders, contest) if contenders else []
    return Trial(
        times_ms={
            row.variant.candidate: tuple(cost.median_ms for cost in row.costs) for row in rows
        }
    )


def _works(spec: GraphSpec, lane: LaneSettings, batch: Batch) -> bool:
    """Whether the graph runs at all: not every engine reads every graph."""
    try:
        engine = open_engine(spec, lane)
        try:
            engine.run(batch)
        finally:
            engine.close()
    except EngineFailed as exc:
        print(f"{spec.path}: {exc}", file=sys.stderr)  # into the log of the build
        return False
    return True
