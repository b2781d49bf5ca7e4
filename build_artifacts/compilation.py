"""The order of the steps between a checked checkpoint and an artifact ready to publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.facts import ModelFacts, read_facts
from build_artifacts.decoders.compilation import DecoderCompilation
from build_artifacts.decoders.judging import LIMITS
from build_artifacts.errors import BuildError, GateFailed
from build_artifacts.evaluation import (
    EVERYTHING,
    Evaluation,
    ModelUnderTest,
    Sampling,
    load_evaluation,
)
from build_artifacts.progress import Progress
from build_artifacts.recipe import Recipe
from build_artifacts.search.gating import Gatekeeper, PassedGraph
from build_artifacts.search.graphs import Graphs
from build_artifacts.search.lanes import is_present
from build_artifacts.search.preparation import (
    Prepared,
    dequantised_once,
    merged_once,
    prepared_once,
)
from build_artifacts.search.search import Search
from build_artifacts.steprunner import StepRunner
from build_artifacts.steps.seal import Identity, Sealing, assemble
from build_artifacts.storage.workspace import Workspace
from deployments.manifest import Device, Head, TaskName
from deployments.processors import usable_cores
from deployments.tuning.costs import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a build goes to find out, beyond what its recipe says."""

    # Per device, of making graphs for candidates; of models that generate, of judging them too.
    search_seconds: float = 300.0
    tune_seconds: float = 60.0
    evaluation: Path | None = None  # labelled data for the gate
    sampling: Sampling = EVERYTHING


EFFORT = Effort()


class Compilation:
    """One build at work in its workspace."""

    def __init__(
        self, place: Workspace, progress: Progress, recipe: Recipe, effort: Effort
    ) -> None:
        self._progress = progress
        self._steps = StepRunner(place, progress)
        self._recipe = recipe
        self._effort = effort

    def artifact(
        self,
        checkpoint: Checkpoint,
        adapter: Adapter | None,
        tasks: tuple[TaskName, ...],
        identity: Identity,
    ) -> Path:
        """A directory that holds the whole artifact. Raises BuildError."""
        self._progress.begin()
        try:
            if checkpoint.gguf is not None:
                checkpoint = dequantised_once(self._steps, checkpoint)
            if adapter is not None:
                checkpoint = merged_once(self._steps, checkpoint, adapter)
            facts = read_facts(checkpoint, tasks)
            if facts.head is Head.NEXT_TOKEN:
                return self._decoder().artifact(checkpoint.weights, facts, identity)
            prepared = self._prepared(checkpoint, facts)
            search = self._search(prepared)
            passed = self._passed(search, facts)
            tables = self._tables(search, passed, identity)
            return self._sealed(identity, prepared, passed, tables)
        finally:
            self._progress.end()

    def _decoder(self) -> DecoderCompilation:
        if self._effort.evaluation is not None:
            raise BuildError(
                "there is no metric for models that generate text",
                hint="leave out `--eval`: they are held against the original's perplexity",
            )
        if unread := sorted(self._recipe.gate.model_fields_set - set(LIMITS)):
            raise BuildError(
                f"the gate of models that generate text knows no `{unread[0]}`",
                hint=f"these limits count for them: {', '.join(LIMITS)}",
            )
        effort = self._effort
        return DecoderCompilation(
            self._steps,
            self._recipe,
            tune_seconds=effort.tune_seconds,
            search_seconds=effort.search_seconds,
        )

    def _prepared(self, checkpoint: Checkpoint, facts: ModelFacts) -> Prepared:
        evaluation = self._evaluation(checkpoint.weights, facts)
        prepared = prepared_once(self._steps, checkpoint.weights, facts, evaluation)
        if not prepared.compaction.is_empty:
            with self._steps.passing("compact", "what pruning set to zero") as step:
                step.found(prepared.compaction.describe())
        return prepared

    def _evaluation(self, weights: Path, facts: ModelFacts) -> Evaluation | None:
        if self._effort.evaluation is None:
            return None
        model = ModelUnderTest(
            directory=weights,
            max_tokens=facts.max_tokens,
            labels=facts.labels,
            problem=facts.problem,
            prompt=dict(facts.prompts).get(facts.default_prompt or "", ""),
            mask_token=facts.mask_token,
        )
        data, sampling = self._effort.evaluation, self._effort.sampling
        return load_evaluation(data, facts.tasks[0], model, sampling)

    def _search(self, prepared: Prepared) -> Search:
        graphs = Graphs(self._steps, prepared)
        gatekeeper = Gatekeeper(self._steps, prepared, graphs, self._recipe.gate)
        seconds = self._effort.search_seconds
        return Search(self._steps, prepared, graphs, gatekeeper, self._recipe, seconds)

    def _passed(self, search: Search, facts: ModelFacts) -> list[PassedGraph]:
        """What is to be sealed, the best of each device first. Raises GateFailed."""
        cpu = search.best(Device.CPU)
        if not cpu:
            self._progress.title("no int8 graph passed the gate: the fp32 graph is sealed")
            fallback = search.gatekeeper.admit(self._recipe.fallback)
            if fallback is None:
                raise GateFailed(
                    f"no graph of `{facts.architecture}` for the CPU passed the accuracy gate",
                    hint="the checkpoint may be damaged: compare it with its published scores",
                )
            cpu = [fallback]
        return [*cpu, *search.best(Device.GPU)]

    def _tables(
        self, search: Search, passed: Sequence[PassedGraph], identity: Identity
    ) -> list[CostTable]:
        """Costs on this host: on the CPU for passes of one thread and of all cores, on a GPU once.

        The time is shared out evenly.
        """
        wanted = [(Device.CPU, threads) for threads in sorted({1, usable_cores()})]
        if is_present(Device.GPU):
            wanted.append((Device.GPU, 1))
        seconds = self._effort.tune_seconds / len(wanted)
        tables = []
        for device, threads in wanted if seconds else ():
            if graphs := [graph for graph in passed if graph.recipe.device is device]:
                tables.append(search.tuned(graphs, identity.version, threads, seconds))
        return tables

    def _sealed(
        self,
        identity: Identity,
        prepared: Prepared,
        passed: Sequence[PassedGraph],
        tables: Sequence[CostTable],
    ) -> Path:
        sealing = Sealing(
            identity=identity,
            prepared=prepared,
            graphs=_winner_first(passed, tables),
            gate=self._recipe.gate,
            tables=tuple(tables),
        )

        def work(into: Path) -> str:
            assemble(sealing, into)
            return ""

        detail = f"{identity.id} version {identity.version}"
        return self._steps.once("artifact", "seal", detail, work)


def _winner_first(
    passed: Sequence[PassedGraph], tables: Sequence[CostTable]
) -> tuple[PassedGraph, ...]:
    """What wins here most often is the best guess for a host that nobody tuned for."""
    winners = {table.chosen()[0].candidate for table in tables if table.threads == 1}
    return tuple(sorted(passed, key=lambda graph: graph.recipe.name not in winners))
