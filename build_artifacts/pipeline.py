"""The compilation of a model: source, checkpoint, family, candidates, accuracy gate, artifact.

`build` publishes one version. If the store holds it already, only `force` builds it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.accuracy_gate import CandidateSearch
from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.checks import check_description
from build_artifacts.checkpoints.early_checks import check_architecture
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.evaluation import digest_data
from build_artifacts.families import find_family
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.presets import FULL
from build_artifacts.progress import BuildProgress
from build_artifacts.pruning.prune import Pruning, describe_pruning
from build_artifacts.recipes import BuildRecipe, artifact_version, short_digest
from build_artifacts.sources.hub import Hub, HuggingFaceHub
from build_artifacts.steps.convert_weights import convert_weights, merge_adapter
from build_artifacts.steps.resolve import resolve
from build_artifacts.steps.seal import (
    ArtifactIdentity,
    read_tool_versions,
    write_artifact,
)
from build_artifacts.workspaces.opening import open_build_workspace, open_scratch
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import model_directory, publish, set_latest
from deployments.artifacts.types import Device
from deployments.engines.cuda_errors import check_context
from deployments.errors import ArtifactError, ManifestInvalid
from deployments.tuning.host import read_host

DEFAULT_BUDGET = BuildBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """One build: the model, how to compile it, and the store to publish it in."""

    ref: str
    store: Path
    id: str | None = None
    task: str | None = None
    adapter: Path | None = None
    recipe: BuildRecipe = FULL
    budget: BuildBudget = DEFAULT_BUDGET
    force: bool = False  # build again if the store holds this version already
    revision: str | None = None  # the only revision to accept; None: any
    pruning: Pruning | None = None
    is_latest: bool = True  # whether requests that name no version get this one


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A version that the build published, or that the store already held."""

    manifest: ArtifactManifest
    directory: Path
    already_built: bool
    replaces_build: bool = False  # whether the store held another build of the version before


def build(request: BuildRequest, progress: BuildProgress, *, hub: Hub | None = None) -> BuildResult:
    """Build `request`. Without `force`, return its version if the store already holds it.

    If another process builds the same version, wait for its end before looking into the store. A
    resumed build continues after the last finished step. With `is_latest`, a version that the store
    already holds becomes `latest` too. Raises BuildError if the build fails.
    """
    if request.adapter is not None and request.id is None:
        raise BuildError(
            f"the build of `{request.ref}` with an adapter would answer for the model without it",
            hint="name the result: "
            f"`hundredfold build {request.ref} --adapter {request.adapter} --id ORGANIZATION/NAME`",
        )
    adapter = read_adapter(request.adapter) if request.adapter else None

    def check(described: Checkpoint) -> None:
        check_description(described)
        if adapter is None:  # an adapter may have another class than its base model
            check_architecture(described, select_tasks(described, None, request.task))

    with open_scratch(request.store) as sources:
        with progress.step("resolve", request.ref) as step:
            checkpoint = resolve(request.ref, sources, hub or HuggingFaceHub(), check)
            step.set_outcome(f"revision {checkpoint.source.revision[:20]}")
        progress.set_source_bytes(checkpoint.count_bytes())
        tasks = select_tasks(checkpoint, adapter, request.task)
        identity = _identify(request, checkpoint, adapter, tasks[0])
        store, version = request.store, identity.version
        build_inputs = json.dumps([repr(request.budget), read_host(Device.CPU).fingerprint])
        with open_build_workspace(
            store, identity.id, version, progress, build_inputs=build_inputs
        ) as workspace:
            found = find_sealed(store, identity.id, version)
            if found is not None and not request.force:
                if request.is_latest:
                    set_latest(store, identity.id, version)
                return found
            steps = StepRunner(workspace, progress)
            progress.begin()
            try:
                staged = _compile(steps, request, checkpoint, adapter, tasks, identity)
            finally:
                progress.end()
            manifest = ArtifactManifest.read(staged)  # raises for a damaged artifact
            directory = publish(
                staged, store, manifest.id, manifest.version, is_latest=request.is_latest
            )
    return BuildResult(manifest, directory, already_built=False, replaces_build=found is not None)


def _compile(
    steps: StepRunner,
    request: BuildRequest,
    checkpoint: Checkpoint,
    adapter: Adapter | None,
    tasks: tuple[str, ...],
    identity: ArtifactIdentity,
) -> Path:
    """Build the artifact in the workspace and return its directory there."""
    checkpoint = convert_weights(steps, checkpoint, tasks)
    if adapter is not None:
        checkpoint = merge_adapter(steps, checkpoint, adapter)
    family = find_family(checkpoint, tasks)
    metadata = family.read_metadata(checkpoint, tasks)
    recipe, budget = request.recipe, request.budget
    context = BuildContext(
        steps=steps,
        weights=checkpoint.weights,
        metadata=metadata,
        recipe=recipe,
        budget=budget,
        pruning=request.pruning,
    )
    family_build = family.start(context)
    search = CandidateSearch.of(family_build, keep=recipe.keep, seconds=budget.search_seconds)
    accepted = search.select_graphs()
    contents = family_build.package(accepted, identity)
    # Without CUDA, graphs failed that work. A resumed build tries them again.
    check_context()

    def seal(into: Path) -> str:
        write_artifact(contents, into)
        return ""

    # A resumed build may accept other graphs than the build that was interrupted.
    key = f"artifact-{short_digest([candidate.digest for candidate in accepted])}"
    detail = f"{identity.id} version {identity.version}"
    return steps.run_cached(key, "seal", detail, seal)


def find_sealed(store: Path, model_id: str, version: str) -> BuildResult | None:
    """Return the stored version, or None if it is missing or damaged and must be built again."""
    directory = model_directory(store, model_id) / version
    try:
        return BuildResult(ArtifactManifest.read(directory), directory, already_built=True)
    except ArtifactError:
        return None


def _identify(
    request: BuildRequest, checkpoint: Checkpoint, adapter: Adapter | None, task: str
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
        raise BuildError(exc.message, hint="pass `--id ORGANIZATION/NAME`") from exc
    if adapter is not None:
        source = source.model_copy(
            update={"adapter": adapter.name, "adapter_revision": adapter.revision}
        )
    if request.pruning is not None:
        source = source.model_copy(update={"pruning": describe_pruning(request.pruning)})
    version = planned_version(request, source.revision, source.adapter_revision, task)
    return ArtifactIdentity(model_id, version, source, request.recipe.digest())


def planned_version(
    request: BuildRequest, revision: str, adapter_revision: str | None, task: str
) -> str:
    """Compute the version that a build of `request` has if its source is at `revision`.

    Raises BuildError if the labeled data or the data for pruning cannot be read.
    """
    path, sampling = request.budget.evaluation, request.budget.sampling
    data = None if path is None else f"{digest_data(path)} {sampling}"
    inputs = [revision, adapter_revision, task, data]
    if request.pruning is not None:
        inputs.append(describe_pruning(request.pruning).model_dump_json())
    return artifact_version(request.recipe, read_tool_versions(), *inputs)
