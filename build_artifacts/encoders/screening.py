"""Speed screening: a short interleaved measurement that ranks graphs before the accuracy gate.

Measuring speed is cheaper than evaluating accuracy, so the gate starts with the fastest graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import exp, log

from pydantic import BaseModel, ConfigDict

from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.engines.forward_pass import Batch
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from deployments.tuning.costs import Shape
from deployments.tuning.measure import build_batches
from deployments.tuning.tuner import MeasurementPlan, VariantSpec, measure_fitting

_SHAPES = (
    Shape(items=1, tokens=16),
    Shape(items=1, tokens=128),
    Shape(items=8, tokens=64),
    Shape(items=8, tokens=128),
)
_SECONDS = 25.0  # s, time budget of all graphs together
# The search stops at a graph whose mean latency is more than this factor times that of the fastest
# accepted graph. It does not stop at a graph that is the fastest at some shape, because the server
# selects a graph per shape.
_MAX_SLOWDOWN = 1.4


class SpeedScreening(BaseModel):
    """Latency of each measured graph at each screened shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    times_ms: dict[str, tuple[float, ...]]  # latencies by graph name, one per shape
    unmeasured: dict[str, str] = {}  # reasons by name of the graphs without latencies

    def mean_ms(self, name: str) -> float:
        """Return the geometric mean of the latencies in milliseconds.

        A slowdown in percent counts equally at every shape.
        """
        times = self.times_ms[name]
        return exp(sum(map(log, times)) / len(times))

    def ranked_names(self) -> list[str]:
        """Return the names of all graphs, first those that are fastest at some shape.

        These graphs and the remaining graphs are each sorted by mean latency.
        """
        fastest = self.fastest()
        return sorted(self.times_ms, key=lambda name: (name not in fastest, self.mean_ms(name)))

    def fastest(self) -> set[str]:
        """Return the graphs that are fastest at some shape."""
        columns = zip(*self.times_ms.values(), strict=True)
        names = list(self.times_ms)
        return {names[column.index(min(column))] for column in columns}

    def is_far_behind(self, name: str, accepted: Sequence[str]) -> bool:
        """Return whether `name` is fastest at no shape and far slower than an accepted graph."""
        if not accepted or name in self.fastest():
            return False
        return self.mean_ms(name) > min(map(self.mean_ms, accepted)) * _MAX_SLOWDOWN

    def describe(self) -> str:
        return ", ".join(f"{name} {self.mean_ms(name):.2f} ms" for name in self.ranked_names())


def screen_speed(
    specs: Mapping[str, GraphSpec],
    settings: EncoderSettings,
    items: Sequence[TokenizedItem],
    max_tokens: int,
) -> SpeedScreening:
    """Measure `specs`, all of one device, in interleaved order.

    Skip graphs that do not run with `settings`. Of the remaining graphs, in the order of `specs`,
    measure as many as fit into memory together. The result ranks only the measured graphs. Raises
    EngineFailed if not even one graph fits, or if every graph fails while it is measured.
    """
    fitting = (s.model_copy(update={"tokens": min(s.tokens, max_tokens)}) for s in _SHAPES)
    shapes = tuple(dict.fromkeys(fitting))
    smallest = build_batches(items, shapes[0])[0]
    # Test each graph alone first: a graph that does not run must not take memory from the others.
    failures = {name: _find_failure(spec, settings, smallest) for name, spec in specs.items()}
    variants = [VariantSpec.of(name, s) for name, s in specs.items() if failures[name] is None]
    plan = MeasurementPlan(settings=settings, shapes=shapes, items=items, seconds=_SECONDS)
    rows = measure_fitting(variants, plan) if variants else []
    if variants and not rows:
        raise EngineFailed("every graph failed while it was measured")
    times_ms = {row.variant.candidate: tuple(cost.median_ms for cost in row.costs) for row in rows}
    unmeasured = {
        name: failure or "it could not be measured together with the others"
        for name, failure in failures.items()
        if name not in times_ms
    }
    return SpeedScreening(times_ms=times_ms, unmeasured=unmeasured)


def _find_failure(spec: GraphSpec, settings: EncoderSettings, batch: Batch) -> str | None:
    """Return why the graph fails on `batch`, or None if it runs."""
    try:
        engine = open_engine(spec, settings)
        try:
            engine.run(batch)
        finally:
            engine.close()
    except EngineFailed as exc:
        print(f"{spec.path}: {exc}", file=sys.stderr)  # stderr goes to the log of the build
        return exc.message
    return None
