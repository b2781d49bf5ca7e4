"""Which candidates are worth sealing on this host: the fastest ones that pass the gate.

Speed is tried before accuracy, because it is cheaper: a short plan of all graphs orders them,
then the gate judges them from the fastest on until enough have passed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import BuildRecipe, CandidateRecipe, digest_of
from build_artifacts.search.gate import AcceptedGraph, AccuracyGate, spec_of
from build_artifacts.search.graphs import CandidateGraphs
from build_artifacts.search.preparation import PreparedModel
from build_artifacts.search.screening_settings import engine_settings, has_device
from build_artifacts.storage.workspace import StepRunner
from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, missing_requirement, open_engine
from deployments.errors import EngineFailed
from deployments.messages import Batch, TokenizedItem
from deployments.tuning.costs import CostTable, Shape
from deployments.tuning.measure import build_batches, supported_shapes
from deployments.tuning.tuner import (
    MeasurementPlan,
    VariantSpec,
    build_cost_table,
    measure_fitting,
    measure_variants,
)

_SHAPES = (
    Shape(items=1, tokens=16),
    Shape(items=1, tokens=128),
    Shape(items=8, tokens=64),
    Shape(items=8, tokens=128),
)
_SECONDS = 25.0


class SpeedScreening(BaseModel):
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


def screen_speed(
    specs: Mapping[str, GraphSpec],
    settings: EncoderSettings,
    items: Sequence[TokenizedItem],
    max_tokens: int,
) -> SpeedScreening:
    """The trial of `specs` by name, all of one device.

    Graphs that do not run on `encoder` are left out, and so are those that there is no memory for
    beside the ones before them. Raises EngineFailed when there is none for the first.
    """
    cut = (s.model_copy(update={"tokens": min(s.tokens, max_tokens)}) for s in _SHAPES)
    shapes = tuple(dict.fromkeys(cut))
    smallest = build_batches(items, shapes[0])[0]
    # Looked at alone first: what does not run must not take the room of what does.
    variants = [
        VariantSpec.of(name, spec)
        for name, spec in specs.items()
        if _can_run(spec, settings, smallest)
    ]
    plan = MeasurementPlan(settings=settings, shapes=shapes, items=items, seconds=_SECONDS)
    rows = measure_fitting(variants, plan) if variants else []
    return SpeedScreening(
        times_ms={
            row.variant.candidate: tuple(cost.median_ms for cost in row.costs) for row in rows
        }
    )


def _can_run(spec: GraphSpec, settings: EncoderSettings, batch: Batch) -> bool:
    """Whether the graph runs at all: not every engine reads every graph."""
    try:
        engine = open_engine(spec, settings)
        try:
            engine.run(batch)
        finally:
            engine.close()
    except EngineFailed as exc:
        print(f"{spec.path}: {exc}", file=sys.stderr)  # into the log of the build
        return False
    return True


_TRIAL_NAME = "trial.json"
_TABLE_NAME = "table.json"
# A graph that is slower than the fastest that passed by this factor is not worth judging.
_BEHIND = 1.4


@dataclass(frozen=True, slots=True)
class CandidateSearch:
    """One build's look for the graphs to seal."""

    steps: StepRunner
    prepared: PreparedModel
    graphs: CandidateGraphs
    gatekeeper: AccuracyGate
    recipe: BuildRecipe
    seconds: float  # of making graphs, after which no further candidate is begun

    def best(self, device: Device) -> list[AcceptedGraph]:
        """The graphs for `device` that may be sealed, the best first; empty when none passes.

        A host without the device cannot tell which is fastest, and takes minutes to judge what it
        was not made for: there it is the first of the recipe that passes.
        """
        if not has_device(device):
            return self._first(device)
        specs = self._specs(device)
        trial = self._trial(device, specs) if len(specs) > 1 else None
        by_name = {recipe.name: recipe for recipe in specs}
        passed: list[AcceptedGraph] = []
        for name in trial.order() if trial else by_name:
            if len(passed) >= self.recipe.keep or _is_behind(name, passed, trial):
                break
            # Mending costs speed, so it is not worth it behind one that passed as it was.
            graph = self.gatekeeper.admit(by_name[name], mend=not passed)
            if graph is not None:
                passed.append(graph)
        return passed

    def _first(self, device: Device) -> list[AcceptedGraph]:
        for recipe in self.recipe.of(device):
            if self._spec(recipe) is None:
                continue
            graph = self.gatekeeper.admit(recipe)
            if graph is not None:
                return [graph]
        return []

    def tuned(
        self, passed: Sequence[AcceptedGraph], version: str, threads: int, seconds: float
    ) -> CostTable:
        """The costs of graphs of one device on this host, for passes of `threads` threads."""
        device = passed[0].recipe.device
        settings = engine_settings(device, threads)

        def work(into: Path) -> str:
            plan = self._contest(settings, seconds)
            specs = [VariantSpec.of(p.recipe.name, p.spec) for p in passed]
            rows = measure_variants(specs, plan)
            found = build_cost_table(version, specs, rows, plan, {})
            (into / _TABLE_NAME).write_bytes(found.to_json())
            return ", ".join(variant.name for variant in found.selected_variants())

        key = f"tune-{device}-{threads}-{digest_of([p.recipe.name for p in passed])[:12]}"
        detail = f"{len(passed)} graphs for {device}, {threads} threads a pass"
        found = self.steps.run_cached(key, "tune", detail, work) / _TABLE_NAME
        return CostTable.model_validate_json(found.read_bytes())

    def _contest(self, settings: EncoderSettings, seconds: float) -> MeasurementPlan:
        return MeasurementPlan(
            settings=settings,
            shapes=supported_shapes(self.prepared.metadata.max_tokens),
            items=self.prepared.reference.items,
            seconds=seconds,
        )

    def _specs(self, device: Device) -> dict[CandidateRecipe, GraphSpec]:
        """How to open each candidate; those that cannot be made or run here are left out."""
        found: dict[CandidateRecipe, GraphSpec] = {}
        first: dict[object, str] = {}
        end_s = time.monotonic() + self.seconds
        for recipe in self.recipe.of(device):
            if found and time.monotonic() > end_s:
                self._skip(recipe, f"the search has taken its {self.seconds:.0f} s")
                continue
            spec = self._spec(recipe)
            if spec is None:
                continue
            # A rewrite that finds nothing to change in this architecture gives the same graph.
            twin = first.setdefault(
                (file_sha256(spec.path), spec.engine, spec.options), recipe.name
            )
            if twin == recipe.name:
                found[recipe] = spec
            else:
                self._skip(recipe, f"the same graph as {twin}")
        return found

    def _spec(self, recipe: CandidateRecipe) -> GraphSpec | None:
        unmade = spec_of(recipe, Path(recipe.name), self.prepared)
        if reason := missing_requirement(unmade, engine_settings(recipe.device, 1)):
            self._skip(recipe, reason)
            return None
        try:
            return spec_of(recipe, self.graphs.graph(recipe), self.prepared)
        except UnsupportedModel as exc:
            self._skip(recipe, exc.message)
            return None

    def _skip(self, recipe: CandidateRecipe, reason: str) -> None:
        with self.steps.run_uncached("skip", recipe.name) as step:
            step.set_outcome(reason)

    def _trial(self, device: Device, specs: Mapping[CandidateRecipe, GraphSpec]) -> SpeedScreening:
        def work(into: Path) -> str:
            trial = screen_speed(
                {recipe.name: spec for recipe, spec in specs.items()},
                engine_settings(device, 1),
                self.prepared.reference.items,
                self.prepared.metadata.max_tokens,
            )
            (into / _TRIAL_NAME).write_text(trial.model_dump_json(), encoding="utf-8")
            return trial.describe()

        key = f"trial-{device}-{digest_of([recipe.name for recipe in specs])[:12]}"
        found = self.steps.run_cached(key, "trial", f"{len(specs)} graphs", work) / _TRIAL_NAME
        return SpeedScreening.model_validate_json(found.read_bytes())


def _is_behind(name: str, passed: Sequence[AcceptedGraph], trial: SpeedScreening | None) -> bool:
    if trial is None or not passed or name in trial.fastest():
        return False
    best_ms = min(trial.mean_ms(graph.recipe.name) for graph in passed)
    return trial.mean_ms(name) > best_ms * _BEHIND
