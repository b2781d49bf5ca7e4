"""One build from request to published version: what it is called, and whether it is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata, read_metadata, select_tasks
from build_artifacts.console import BuildProgress
from build_artifacts.decoders.build import DecoderBuild
from build_artifacts.decoders.measurement import LIMITS
from build_artifacts.errors import BuildError, GateFailed, UnsafeSource
from build_artifacts.evaluation import (
    ALL_EXAMPLES,
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    digest_data,
    load_evaluation,
)
from build_artifacts.recipes import FULL, BuildRecipe, artifact_version
from build_artifacts.search.gate import AcceptedGraph, AccuracyGate
from build_artifacts.search.graphs import CandidateGraphs
from build_artifacts.search.preparation import (
    PreparedModel,
    cached_dequantize,
    cached_merge,
    cached_prepare,
)
from build_artifacts.search.screening_settings import has_device
from build_artifacts.search.search import CandidateSearch
from build_artifacts.sources.hub import Hub, HuggingFaceHub
from build_artifacts.steps.resolve import resolve
from build_artifacts.steps.seal import (
    ArtifactIdentity,
    EncoderArtifact,
    assemble,
    read_tool_versions,
)
from build_artifacts.storage.workspace import StepRunner, Workspace, build_workspace, scratch
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import model_directory, publish, set_latest
from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.errors import ArtifactError, ManifestInvalid
from deployments.machine import usable_cores
from deployments.tuning.costs import CostTable
from deployments.tuning.host import read_host


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBudget:
    """How far a build goes to find out, beyond what its recipe says."""

    # Per device, of making graphs for candidates; of models that generate, of judging them too.
    search_seconds: float = 300.0
    tune_seconds: float = 60.0
    evaluation: Path | None = None  # labelled data for the gate
    sampling: ExampleSampling = ALL_EXAMPLES


DEFAULT_BUDGET = BuildBudget()


class EncoderBuild:
    """One build at work in its workspace."""

    def __init__(
        self, place: Workspace, progress: BuildProgress, recipe: BuildRecipe, effort: BuildBudget
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
        identity: ArtifactIdentity,
    ) -> Path:
        """A directory that holds the whole artifact. Raises BuildError."""
        self._progress.begin()
        try:
            if checkpoint.gguf is not None:
                checkpoint = cached_dequantize(self._steps, checkpoint)
            if adapter is not None:
                checkpoint = cached_merge(self._steps, checkpoint, adapter)
            metadata = read_metadata(checkpoint, tasks)
            if metadata.head is ModelHead.NEXT_TOKEN:
                return self._decoder().artifact(checkpoint.weights, metadata, identity)
            prepared = self._prepared(checkpoint, metadata)
            search = self._search(prepared)
            passed = self._passed(search, metadata)
            tables = self._tables(search, passed, identity)
            return self._sealed(identity, prepared, passed, tables)
        finally:
            self._progress.end()

    def _decoder(self) -> DecoderBuild:
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
        return DecoderBuild(
            self._steps,
            self._recipe,
            tune_seconds=effort.tune_seconds,
            search_seconds=effort.search_seconds,
        )

    def _prepared(self, checkpoint: Checkpoint, metadata: CheckpointMetadata) -> PreparedModel:
        evaluation = self._evaluation(checkpoint.weights, metadata)
        prepared = cached_prepare(self._steps, checkpoint.weights, metadata, evaluation)
        if not prepared.compaction.is_empty:
            with self._steps.run_uncached("compact", "what pruning set to zero") as step:
                step.set_outcome(prepared.compaction.describe())
        return prepared

    def _evaluation(self, weights: Path, metadata: CheckpointMetadata) -> Evaluation | None:
        if self._effort.evaluation is None:
            return None
        model = EvaluatedModel(
            directory=weights,
            max_tokens=metadata.max_tokens,
            labels=metadata.labels,
            problem_type=metadata.problem_type,
            prompt=dict(metadata.prompts).get(metadata.default_prompt or "", ""),
            mask_token=metadata.mask_token,
        )
        data, sampling = self._effort.evaluation, self._effort.sampling
        return load_evaluation(data, metadata.tasks[0], model, sampling)

    def _search(self, prepared: PreparedModel) -> CandidateSearch:
        graphs = CandidateGraphs(self._steps, prepared)
        gatekeeper = AccuracyGate(self._steps, prepared, graphs, self._recipe.gate)
        seconds = self._effort.search_seconds
        return CandidateSearch(self._steps, prepared, graphs, gatekeeper, self._recipe, seconds)

    def _passed(self, search: CandidateSearch, metadata: CheckpointMetadata) -> list[AcceptedGraph]:
        """What is to be sealed, the best of each device first. Raises GateFailed."""
        cpu = search.best(Device.CPU)
        if not cpu:
            self._progress.message("no int8 graph passed the gate: the fp32 graph is sealed")
            fallback = search.gatekeeper.admit(self._recipe.fallback)
            if fallback is None:
                raise GateFailed(
                    f"no graph of `{metadata.architecture}` for the CPU passed the accuracy gate",
                    hint="the checkpoint may be damaged: compare it with its published scores",
                )
            cpu = [fallback]
        return [*cpu, *search.best(Device.GPU)]

    def _tables(
        self, search: CandidateSearch, passed: Sequence[AcceptedGraph], identity: ArtifactIdentity
    ) -> list[CostTable]:
        """Costs on this host: on the CPU for passes of one thread and of all cores, on a GPU once.

        The time is shared out evenly.
        """
        wanted = [(Device.CPU, threads) for threads in sorted({1, usable_cores()})]
        if has_device(Device.GPU):
            wanted.append((Device.GPU, 1))
        seconds = self._effort.tune_seconds / len(wanted)
        tables = []
        for device, threads in wanted if seconds else ():
            if graphs := [graph for graph in passed if graph.recipe.device is device]:
                tables.append(search.tuned(graphs, identity.version, threads, seconds))
        return tables

    def _sealed(
        self,
        identity: ArtifactIdentity,
        prepared: PreparedModel,
        passed: Sequence[AcceptedGraph],
        tables: Sequence[CostTable],
    ) -> Path:
        sealing = EncoderArtifact(
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
        return self._steps.run_cached("artifact", "seal", detail, work)


def _winner_first(
    passed: Sequence[AcceptedGraph], tables: Sequence[CostTable]
) -> tuple[AcceptedGraph, ...]:
    """What wins here most often is the best guess for a host that nobody tuned for."""
    winners = {table.selected_variants()[0].candidate for table in tables if table.threads == 1}
    return tuple(sorted(passed, key=lambda graph: graph.recipe.name not in winners))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What is to be built, and into which store."""

    ref: str
    store: Path
    id: str | None = None
    task: TaskName | None = None
    adapter: Path | None = None
    recipe: BuildRecipe = FULL
    budget: BuildBudget = DEFAULT_BUDGET
    force: bool = False  # build also what is already there
    revision: str | None = None  # refuse the source when it is not this one


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A version that is in the store now."""

    manifest: ArtifactManifest
    directory: Path
    already_built: bool


def build(request: BuildRequest, progress: BuildProgress, *, hub: Hub | None = None) -> BuildResult:
    """Build `request`, unless the same build is in the store already. Raises BuildError.

    One build of a version at a time: another one waits, and then finds it. What an interrupted
    build has finished is not done again.
    """
    with scratch(request.store) as sources:
        with progress.step("resolve", request.ref) as step:
            checkpoint = resolve(request.ref, sources, hub or HuggingFaceHub())
            step.set_outcome(f"revision {checkpoint.source.revision[:20]}")
        adapter = read_adapter(request.adapter) if request.adapter else None
        tasks = select_tasks(checkpoint, adapter, request.task)
        identity = _identity(request, checkpoint, adapter, tasks[0])
        store, version = request.store, identity.version
        build_inputs = json.dumps([repr(request.budget), read_host(Device.CPU).fingerprint])
        with build_workspace(
            store, identity.id, version, progress, build_inputs=build_inputs
        ) as place:
            found = find_sealed(store, identity.id, version)
            if found is not None and not request.force:
                set_latest(store, identity.id, version)
                return found
            run = EncoderBuild(place, progress, request.recipe, request.budget)
            staged = run.artifact(checkpoint, adapter, tasks, identity)
            manifest = ArtifactManifest.read(staged)  # a damaged artifact is never published
            directory = publish(staged, store, manifest.id, manifest.version)
    return BuildResult(manifest, directory, already_built=False)


def find_sealed(store: Path, model_id: str, version: str) -> BuildResult | None:
    """The version, if it is in the store and every digest holds; a damaged one is built anew."""
    directory = model_directory(store, model_id) / version
    try:
        return BuildResult(ArtifactManifest.read(directory), directory, already_built=True)
    except ArtifactError:
        return None


def _identity(
    request: BuildRequest, checkpoint: Checkpoint, adapter: Adapter | None, task: TaskName
) -> ArtifactIdentity:
    source = checkpoint.source
    if request.revision not in (None, source.revision):
        raise UnsafeSource(
            f"`{request.ref}` is not the source that was pinned: {source.revision}",
            hint=f"expected: {request.revision}",
        )
    model_id = request.id or checkpoint.default_id
    try:
        model_directory(request.store, model_id)
    except ManifestInvalid as exc:
        raise BuildError(exc.message, hint="pass `--id ORGANISATION/NAME`") from exc
    if adapter is not None:
        source = source.model_copy(
            update={"adapter": adapter.name, "adapter_revision": adapter.revision}
        )
    version = planned_version(request, source.revision, source.adapter_revision, task)
    return ArtifactIdentity(model_id, version, source, request.recipe.digest())


def planned_version(
    request: BuildRequest, revision: str, adapter_revision: str | None, task: TaskName
) -> str:
    """The version that building `request` gives, its source being at that revision.

    Raises BuildError when its labelled data cannot be read.
    """
    path, sampling = request.budget.evaluation, request.budget.sampling
    data = None if path is None else f"{digest_data(path)} {sampling}"
    tools = read_tool_versions()
    return artifact_version(request.recipe, tools, revision, adapter_revision, task, data)
