"""Which candidates are worth sealing on this host: the fastest ones that pass the gate.

Speed is tried before accuracy, because it is cheaper: a short contest of all graphs orders them,
then the gate judges them from the fastest on until enough have passed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipe import CandidateRecipe, Recipe, digest_of
from build_artifacts.search.gating import Gatekeeper, PassedGraph, spec_of
from build_artifacts.search.graphs import Graphs
from build_artifacts.search.lanes import is_present, lane_for
from build_artifacts.search.preparation import Prepared
from build_artifacts.search.trial import Trial, hold_trial
from build_artifacts.steprunner import StepRunner
from deployments.config import LaneSettings
from deployments.engines import GraphSpec, lacking
from deployments.manifest import Device
from deployments.sealed_files import file_sha256
from deployments.tuning.costs import CostTable
from deployments.tuning.measure import shapes_up_to
from deployments.tuning.tuner import Contender, Contest, compare, table

_TRIAL_NAME = "trial.json"
_TABLE_NAME = "table.json"
# A graph that is slower than the fastest that passed by this factor is not worth judging.
_BEHIND = 1.4


@dataclass(frozen=True, slots=True)
class Search:
    """One build's look for the graphs to seal."""

    steps: StepRunner
    prepared: Prepared
    graphs: Graphs
    gatekeeper: Gatekeeper
    recipe: Recipe
    seconds: float  # of making graphs, after which no further candidate is begun

    def best(self, device: Device) -> list[PassedGraph]:
        """The graphs for `device` that may be sealed, the best first; empty when none passes.

        A host without the device cannot tell which is fastest, and takes minutes to judge what it
        was not made for: there it is the first of the recipe that passes.
        """
        if not is_present(device):
            return self._first(device)
        specs = self._specs(device)
        trial = self._trial(device, specs) if len(specs) > 1 else None
        by_name = {recipe.name: recipe for recipe in specs}
        passed: list[PassedGraph] = []
        for name in trial.order() if trial else by_name:
            if len(passed) >= self.recipe.keep or _is_behind(name, passed, trial):
                break
            # Mending costs speed, so it is not worth it behind one that passed as it was.
            graph = self.gatekeeper.admit(by_name[name], mend=not passed)
            if graph is not None:
                passed.append(graph)
        return passed

    def _first(self, device: Device) -> list[PassedGraph]:
        for recipe in self.recipe.of(device):
            if self._spec(recipe) is None:
                continue
            graph = self.gatekeeper.admit(recipe)
            if graph is not None:
                return [graph]
        return []

    def tuned(
        self, passed: Sequence[PassedGraph], version: str, threads: int, seconds: float
    ) -> CostTable:
        """The costs of graphs of one device on this host, for passes of `threads` threads."""
        device = passed[0].recipe.device
        lane = lane_for(device, threads)

        def work(into: Path) -> str:
            contest = self._contest(lane, seconds)
            contenders = [Contender.of(p.recipe.name, p.spec) for p in passed]
            rows = compare(contenders, contest)
            found = table(version, contenders, rows, contest, {})
            (into / _TABLE_NAME).write_bytes(found.to_json())
            return ", ".join(variant.name for variant in found.chosen())

        key = f"tune-{device}-{threads}-{digest_of([p.recipe.name for p in passed])[:12]}"
        detail = f"{len(passed)} graphs for {device}, {threads} threads a pass"
        found = self.steps.once(key, "tune", detail, work) / _TABLE_NAME
        return CostTable.model_validate_json(found.read_bytes())

    def _contest(self, lane: LaneSettings, seconds: float) -> Contest:
        return Contest(
            lane=lane,
            shapes=shapes_up_to(self.prepared.facts.max_tokens),
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
        if reason := lacking(unmade, lane_for(recipe.device, 1)):
            self._skip(recipe, reason)
            return None
        try:
            return spec_of(recipe, self.graphs.graph(recipe), self.prepared)
        except UnsupportedModel as exc:
            self._skip(recipe, exc.message)
            return None

    def _skip(self, recipe: CandidateRecipe, reason: str) -> None:
        with self.steps.passing("skip", recipe.name) as step:
            step.found(reason)

    def _trial(self, device: Device, specs: Mapping[CandidateRecipe, GraphSpec]) -> Trial:
        def work(into: Path) -> str:
            trial = hold_trial(
                {recipe.name: spec for recipe, spec in specs.items()},
                lane_for(device, 1),
                self.prepared.reference.items,
                self.prepared.facts.max_tokens,
            )
            (into / _TRIAL_NAME).write_text(trial.model_dump_json(), encoding="utf-8")
            return trial.describe()

        key = f"trial-{device}-{digest_of([recipe.name for recipe in specs])[:12]}"
        found = self.steps.once(key, "trial", f"{len(specs)} graphs", work) / _TRIAL_NAME
        return Trial.model_validate_json(found.read_bytes())


def _is_behind(name: str, passed: Sequence[PassedGraph], trial: Trial | None) -> bool:
    if trial is None or not passed or name in trial.fastest():
        return False
    best_ms = min(trial.mean_ms(graph.recipe.name) for graph in passed)
    return trial.mean_ms(name) > best_ms * _BEHIND
