"""Encoder models: BERT and its relatives, exported as ONNX graphs or torch programs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from build_artifacts.build_devices import engine_settings, has_device
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata, read_encoder_metadata
from build_artifacts.encoders.candidates import (
    CandidateGraphs,
    build_graph_spec,
    with_other_calibrations,
)
from build_artifacts.encoders.preparation import (
    COMPACTION_NAME,
    PreparedModel,
    cached_prepare,
    load_examples,
)
from build_artifacts.encoders.pruned import prepare_pruned
from build_artifacts.encoders.screening import SpeedScreening, screen_speed
from build_artifacts.errors import BuildError, UnsupportedModel
from build_artifacts.evaluation import Evaluation, score_engine
from build_artifacts.families.base import (
    Attempt,
    BuildContext,
    EvaluatedCandidate,
    GateResult,
    ModelBuild,
    Ranking,
    describe_search_timeout,
)
from build_artifacts.gpu_placement import check_encoder_recipe
from build_artifacts.graph_files import list_files
from build_artifacts.recipes import (
    CandidateRecipe,
    DynamicInt8,
    SmoothedInt8,
    StaticInt8,
    short_digest,
)
from build_artifacts.smoothing.quantizer import has_gated_layers
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity
from build_artifacts.workspaces.workspace import repeat_when_resumed
from deployments.artifacts.manifest import REFERENCE_NAME, TOKENIZER_NAME, Candidate, Gate
from deployments.artifacts.store import file_sha256
from deployments.artifacts.types import Device, ModelHead
from deployments.engines import EncoderEngine, GraphSpec, missing_requirement, open_engine
from deployments.errors import EngineFailed
from deployments.host.machine import usable_cores
from deployments.tasks import find_head
from deployments.tuning.costs import CostTable
from deployments.tuning.measure import supported_shapes
from deployments.tuning.parity import check_engine
from deployments.tuning.tuner import (
    MeasurementPlan,
    VariantSpec,
    build_cost_table,
    measure_variants,
)

# Numbers of MatMuls that successive accuracy fallbacks exclude from the quantization scheme. The
# fallbacks skip numbers above _MAX_EXCLUDED_SHARE of the graph's MatMuls.
_EXCLUDED_COUNTS = (2, 4, 8, 16, 32)
_MAX_EXCLUDED_SHARE = 0.25
# Limits of the gate that apply to models that generate text only.
_GENERATION_LIMITS = {"next_token_agreement", "perplexity_increase"}
_SCREENING_NAME = "screening.json"
_TABLE_NAME = "table.json"

EncoderCandidate = EvaluatedCandidate[CandidateRecipe, GraphSpec]


class EncoderFamily:
    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        return find_head(tasks[0]) is not ModelHead.NEXT_TOKEN

    def read_metadata(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
        return read_encoder_metadata(checkpoint, tasks)

    def start(self, context: BuildContext) -> EncoderBuild:
        check_encoder_recipe(context.recipe)
        _check_gate(context.recipe.gate)
        evaluation = _load_evaluation(context)
        steps, metadata = context.steps, context.metadata
        prepared = cached_prepare(steps, context.weights, metadata, evaluation)
        if context.pruning is not None:
            prepared = prepare_pruned(steps, prepared, context.pruning, context.recipe.gate)
        if not prepared.compaction.is_empty:
            with steps.run_uncached("compact", "weights that pruning set to zero") as step:
                step.set_outcome(prepared.compaction.describe())
        return EncoderBuild(context, prepared, CandidateGraphs(steps, prepared))


def _check_gate(gate: Gate) -> None:
    """Raise BuildError for a limit that only models that generate text have."""
    if foreign := sorted(gate.model_fields_set & _GENERATION_LIMITS):
        known = (name for name in Gate.model_fields if name not in _GENERATION_LIMITS)
        raise BuildError(
            f"`--gate {foreign[0]}` is supported for models that generate text only",
            hint=f"use one of {', '.join(known)}",
        )


def _load_evaluation(context: BuildContext) -> Evaluation | None:
    path, sampling = context.budget.evaluation, context.budget.sampling
    if path is None:
        return None
    return load_examples(path, context.weights, context.metadata, sampling)


class EncoderBuild(ModelBuild[CandidateRecipe, GraphSpec]):
    gate_failed_hint = (
        "the checkpoint may be damaged: compare it with its published scores; if only batched "
        "values are too low, padding changes the answers of this architecture"
    )

    def __init__(
        self, context: BuildContext, prepared: PreparedModel, graphs: CandidateGraphs
    ) -> None:
        super().__init__(context)
        self.prepared = prepared
        self._graphs = graphs
        self._exported: set[str] = set()  # keys of the attempts whose export succeeded

    def candidates(self, device: Device) -> Sequence[CandidateRecipe]:
        return self.context.recipe.candidates_for(device)

    @property
    def fallback(self) -> CandidateRecipe:
        return self.context.recipe.fallback

    def attempts(self, recipe: CandidateRecipe) -> Iterator[Attempt[CandidateRecipe]]:
        """Yield the recipe, then the recipe with each of its `other_calibrations`.

        Further attempts exclude more and more MatMuls from the quantization scheme, if it supports
        exclusions; with smoothed int8, from its other calibration if the model has gated layers. If
        the export of the unchanged recipe fails, there are no further attempts.
        """
        first = _build_attempt(recipe)
        yield first
        if first.key not in self._exported:
            return
        for other in with_other_calibrations(recipe):
            if isinstance(other.quantization, SmoothedInt8):
                if not has_gated_layers(self._graphs.float_graph(recipe)):
                    continue
                recipe = other
            yield _build_attempt(other)
        if isinstance(recipe.quantization, DynamicInt8 | StaticInt8 | SmoothedInt8):
            ranked = self._graphs.sensitive_nodes(recipe)
            for count in _EXCLUDED_COUNTS:
                if count <= len(ranked) * _MAX_EXCLUDED_SHARE:
                    yield _build_attempt(recipe, tuple(ranked[:count]))

    def export(self, attempt: Attempt[CandidateRecipe]) -> GraphSpec:
        recipe = attempt.recipe
        planned = build_graph_spec(recipe, Path(recipe.name), self.prepared)
        if reason := missing_requirement(planned, engine_settings(recipe.device, 1)):
            raise UnsupportedModel(reason, hint="install what is missing and build again")
        graph = self._graphs.graph(recipe, attempt.excluded_nodes)
        self._exported.add(attempt.key)
        return build_graph_spec(recipe, graph, self.prepared)

    def evaluate(self, spec: GraphSpec) -> GateResult:
        # Nothing else runs during the evaluation, so the engine may use all cores.
        settings = engine_settings(spec.device, usable_cores())
        try:
            engine = open_engine(spec, settings)
        except EngineFailed as exc:
            return GateResult(parity=None, reasons=(exc.message,))
        try:
            found = check_engine(engine, self.prepared.reference, self._gate, spec.head)
            # Skip the scores of a GPU graph on a host without a GPU: half precision takes minutes
            # on a CPU, and the scores would only confirm the parity.
            is_scored = found.passed and has_device(spec.device)
            scores, reasons = self._score(engine) if is_scored else ({}, found.reasons)
        except EngineFailed as exc:
            return GateResult(parity=None, reasons=(exc.message,))
        finally:
            engine.close()
        return GateResult(parity=found.parity, scores=scores, reasons=reasons)

    def _score(self, engine: EncoderEngine) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the metrics on the labeled data, and the violated limits."""
        evaluation = self.prepared.evaluation
        if evaluation is None:
            return {}, ()
        scores = score_engine(engine, evaluation)
        limit = self._gate.metric_drop
        return scores, evaluation.find_violations(self.prepared.scores, scores, max_drop=limit)

    def rank(self, device: Device) -> Ranking[CandidateRecipe]:
        specs = self._export_candidates(device)
        if len(specs) < 2:
            return Ranking(tuple(specs))
        by_name = {recipe.name: recipe for recipe in specs}
        try:
            screening = self._screen(device, {r.name: spec for r, spec in specs.items()})
        except EngineFailed as exc:
            self.context.steps.report_skipped(f"ranking by speed for {device}", exc.message)
            return Ranking(tuple(specs))
        return Ranking([by_name[name] for name in screening.ranked_names()], screening)

    def _export_candidates(self, device: Device) -> dict[CandidateRecipe, GraphSpec]:
        steps, seconds = self.context.steps, self.context.budget.search_seconds
        exported: dict[CandidateRecipe, GraphSpec] = {}
        names: dict[object, str] = {}
        end_s = time.monotonic() + seconds
        for recipe in self.candidates(device):
            if exported and time.monotonic() > end_s:
                steps.report_skipped(recipe.name, describe_search_timeout(seconds))
                continue
            try:
                spec = self.export(_build_attempt(recipe))
            except UnsupportedModel as exc:
                steps.report_skipped(recipe.name, exc.message)
                continue
            # Skip duplicates: two recipes give equal graphs if the rewrite in which they differ
            # matches nothing in this architecture.
            files = list_files(spec.path)
            key = (*map(file_sha256, files), spec.engine, spec.options)
            if (same := names.setdefault(key, recipe.name)) == recipe.name:
                exported[recipe] = spec
            else:
                steps.report_skipped(recipe.name, f"the same graph as {same}")
        return exported

    def _screen(self, device: Device, specs: Mapping[str, GraphSpec]) -> SpeedScreening:
        def work(into: Path) -> str:
            screening = screen_speed(
                specs,
                engine_settings(device, 1),
                self.prepared.reference.items,
                self.prepared.metadata.max_tokens,
            )
            (into / _SCREENING_NAME).write_text(screening.model_dump_json(), encoding="utf-8")
            if screening.unmeasured:
                repeat_when_resumed(into)
            return screening.describe()

        key = f"screen-{device}-{short_digest(list(specs))}"
        done = self.context.steps.run_cached(key, "screen", f"{len(specs)} graphs", work)
        return SpeedScreening.model_validate_json((done / _SCREENING_NAME).read_bytes())

    def package(
        self, accepted: Sequence[EncoderCandidate], identity: ArtifactIdentity
    ) -> ArtifactContents:
        tables = self._build_tables(accepted, identity.version)
        ranked = _fastest_first(accepted, tables)
        names = _name_graphs(ranked)
        prepared, compaction = self.prepared, self.prepared.compaction
        # compaction.json lists the heads and channels that compaction removed from each layer.
        compacted = {COMPACTION_NAME: prepared.reference_dir / COMPACTION_NAME}
        return ArtifactContents(
            identity=identity,
            metadata=prepared.metadata,
            candidates=tuple(_describe_candidate(c, names[c.spec.path]) for c in ranked),
            gate=self._gate,
            scores=prepared.scores,
            files={
                TOKENIZER_NAME: prepared.weights / TOKENIZER_NAME,
                REFERENCE_NAME: prepared.reference_dir / REFERENCE_NAME,
                **({} if compaction.is_empty else compacted),
                **_collect_files(names),
            },
            cost_tables=tuple(tables),
            pruned=None if compaction.is_empty else compaction.describe(),
        )

    def _build_tables(self, accepted: Sequence[EncoderCandidate], version: str) -> list[CostTable]:
        """Measure the graphs on the CPU with one thread and with all cores, and on a GPU once.

        Each measurement gets the same share of the time. If a measurement fails, its table is
        missing, and replicas on hosts of this kind tune the model.
        """
        runs = [(Device.CPU, threads) for threads in sorted({1, usable_cores()})]
        if has_device(Device.GPU):
            runs.append((Device.GPU, 1))
        seconds = self.context.budget.tune_seconds / len(runs)
        tables = []
        for device, threads in runs if seconds else ():
            if not (graphs := [c for c in accepted if c.recipe.device is device]):
                continue
            try:
                tables.append(self._build_table(graphs, version, threads, seconds))
            except EngineFailed as exc:
                self.context.steps.report_skipped(f"cost table for {device}", exc.message)
        return tables

    def _build_table(
        self, graphs: Sequence[EncoderCandidate], version: str, threads: int, seconds: float
    ) -> CostTable:
        """Measure graphs of one device on this host with `threads` threads per forward pass.

        Raises EngineFailed as `measure_variants` does.
        """
        device = graphs[0].recipe.device
        plan = MeasurementPlan(
            settings=engine_settings(device, threads),
            shapes=supported_shapes(self.prepared.metadata.max_tokens),
            items=self.prepared.reference.items,
            seconds=seconds,
        )

        def work(into: Path) -> str:
            variants = [VariantSpec.of(c.recipe.name, c.spec) for c in graphs]
            rows = measure_variants(variants, plan)
            table = build_cost_table(version, variants, rows, plan)
            (into / _TABLE_NAME).write_bytes(table.to_json())
            return ", ".join(variant.name for variant in table.selected_variants())

        key = f"tune-{device}-{threads}-{short_digest([c.digest for c in graphs])}"
        detail = f"{len(graphs)} graphs for {device}, {threads} threads per forward pass"
        done = self.context.steps.run_cached(key, "tune", detail, work)
        return CostTable.model_validate_json((done / _TABLE_NAME).read_bytes())

    @property
    def _gate(self) -> Gate:
        return self.context.recipe.gate


def _build_attempt(
    recipe: CandidateRecipe, excluded_nodes: tuple[str, ...] = ()
) -> Attempt[CandidateRecipe]:
    excluded = f", {len(excluded_nodes)} MatMuls excluded" if excluded_nodes else ""
    scheme = recipe.quantization
    has_token_ranges = isinstance(scheme, SmoothedInt8) and scheme.gated_ranges == "token"
    return Attempt(
        recipe=recipe,
        label=f"{recipe.name}{', ranges per token' if has_token_ranges else ''}{excluded}",
        key=short_digest((recipe, excluded_nodes)),
        excluded_nodes=excluded_nodes,
    )


def _fastest_first(
    accepted: Sequence[EncoderCandidate], tables: Sequence[CostTable]
) -> list[EncoderCandidate]:
    """Move the fastest candidate of each device to the front, by the cost tables for one thread.

    A host without measurements uses the first candidate for its device.
    """
    winners = {t.selected_variants()[0].candidate for t in tables if t.threads == 1}
    return sorted(accepted, key=lambda candidate: candidate.recipe.name not in winners)


def _name_graphs(candidates: Sequence[EncoderCandidate]) -> dict[Path, str]:
    """Return the file name of each graph in the artifact. Equal graphs share a file.

    A graph with a weight file has a directory of its own, because the graph file refers to the
    weight file by name.
    """
    names: dict[Path, str] = {}
    for candidate in candidates:
        path, name = candidate.spec.path, candidate.recipe.name
        is_large = len(list_files(path)) > 1
        names.setdefault(
            path, f"graphs/{name}/{path.name}" if is_large else f"graphs/{name}{path.suffix}"
        )
    return names


def _collect_files(names: Mapping[Path, str]) -> dict[str, Path]:
    """Return the graphs and their weight files by their names in the artifact."""
    return {
        name + file.name.removeprefix(path.name): file
        for path, name in names.items()
        for file in list_files(path)
    }


def _describe_candidate(candidate: EncoderCandidate, graph: str) -> Candidate:
    recipe = candidate.recipe
    return Candidate(
        name=recipe.name,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        graph=graph,
        options=candidate.spec.options,
        parity=candidate.parity,
        scores=dict(candidate.result.scores),
        excluded_nodes=candidate.excluded_nodes,
    )
