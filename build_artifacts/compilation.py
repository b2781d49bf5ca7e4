"""The order of the steps between a checked checkpoint and an artifact ready to publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_artifacts.adapter import Adapter
from build_artifacts.checkpoint import Checkpoint
from build_artifacts.errors import GateFailed
from build_artifacts.facts import ModelFacts, read_facts
from build_artifacts.probes import PROBES
from build_artifacts.progress import Progress, Step
from build_artifacts.recipe import CandidateRecipe, ExportRecipe, Recipe
from build_artifacts.steps.export import export
from build_artifacts.steps.merge import merge
from build_artifacts.steps.quantise import quantise
from build_artifacts.steps.seal import Identity, PassedGraph, assemble
from build_artifacts.steps.verify import (
    Reference,
    Verdict,
    encode_probes,
    torch_rows,
    verify,
)
from build_artifacts.workspace import Workspace
from deployments.manifest import TOKENIZER_NAME, Device, Parity, TaskName


class Compilation:
    """One build at work in its workspace."""

    def __init__(self, place: Workspace, progress: Progress, recipe: Recipe) -> None:
        self._place = place
        self._progress = progress
        self._recipe = recipe
        self._exports: dict[ExportRecipe, Path] = {}

    def artifact(
        self,
        checkpoint: Checkpoint,
        adapter: Adapter | None,
        tasks: tuple[TaskName, ...],
        identity: Identity,
    ) -> Path:
        """A directory that holds the whole artifact. Raises BuildError."""
        self._progress.begin(self._steps(adapter))
        try:
            if adapter is not None:
                with self._step("merge", f"LoRA adapter {adapter.name}"):
                    checkpoint = merge(checkpoint, adapter, self._place.directory("merged"))
            with self._step("reference", f"fp32 torch, {len(PROBES)} probe texts") as step:
                facts = read_facts(checkpoint, tasks)
                reference = _reference(checkpoint.weights, facts)
                step.found(f"{facts.architecture}, {facts.width} wide, {facts.max_tokens} tokens")
            graphs = self._graphs(checkpoint.weights, facts, reference)
            with self._step("seal", f"{identity.id} version {identity.version}"):
                staged = self._place.directory("artifact")
                assemble(identity, facts, graphs, checkpoint.weights / TOKENIZER_NAME, staged)
        finally:
            self._progress.end()
        return staged

    def _steps(self, adapter: Adapter | None) -> int:
        first = [lane[0] for lane in self._recipe.lanes]
        return 2 + (adapter is not None) + sum(2 + (c.int8 is not None) for c in first)

    @contextmanager
    def _step(self, name: str, detail: str) -> Iterator[Step]:
        with self._progress.step(name, detail) as step, self._place.quiet():
            yield step

    def _graphs(self, weights: Path, facts: ModelFacts, reference: Reference) -> list[PassedGraph]:
        """The best graph of each lane. Raises GateFailed when there is none for the CPU."""
        graphs = []
        for lane in self._recipe.lanes:
            for candidate in lane:
                graph = self._graph(weights, facts, candidate)
                if parity := self._verified(graph, candidate, facts, reference):
                    graphs.append(PassedGraph(candidate, graph, parity))
                    break
        if not any(passed.recipe.device is Device.CPU for passed in graphs):
            raise GateFailed(
                f"no graph of `{facts.architecture}` for the CPU passed the accuracy gate",
                hint="the checkpoint may be damaged: compare it with its published scores",
            )
        return graphs

    def _graph(self, weights: Path, facts: ModelFacts, candidate: CandidateRecipe) -> Path:
        exported = self._exports.get(candidate.export) or self._export(weights, facts, candidate)
        self._exports[candidate.export] = exported
        if candidate.int8 is None:
            return exported
        with self._step("quantise", f"{candidate.name}: dynamic int8") as step:
            graph = self._place.directory("graphs") / f"{candidate.name}.onnx"
            quantise(exported, candidate.int8, graph)
            step.found(_megabytes(graph))
        return graph

    def _export(self, weights: Path, facts: ModelFacts, candidate: CandidateRecipe) -> Path:
        recipe = candidate.export
        fused = f", fused for {recipe.fusions}" if recipe.fusions else ""
        with self._step("export", f"{candidate.name}: {recipe.dtype} graph{fused}") as step:
            graph = self._place.directory("exports") / f"{candidate.name}.onnx"
            export(weights, facts, recipe, graph)
            step.found(_megabytes(graph))
        return graph

    def _verified(
        self, graph: Path, candidate: CandidateRecipe, facts: ModelFacts, reference: Reference
    ) -> Parity | None:
        with self._step("verify", f"{candidate.name} against fp32 torch") as step:
            verdict = verify(graph, candidate, facts, reference, self._recipe.gate)
            step.found(_told(verdict))
        return verdict.parity if verdict.passed else None


def _reference(weights: Path, facts: ModelFacts) -> Reference:
    probes = encode_probes(weights, facts.max_tokens, PROBES)
    return Reference(probes, torch_rows(weights, facts, probes))


def _told(verdict: Verdict) -> str:
    if not verdict.passed:
        return f"left out, {'; '.join(verdict.reasons)}"
    parity = verdict.parity
    assert parity is not None, "a verdict without numbers has reasons; this is a bug"
    labels = "" if parity.top1_agreement is None else f", labels {parity.top1_agreement:.1%}"
    return f"passed, cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst{labels}"


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
