"""One build from request to published version: what it is called, and whether it is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.facts import tasks_of
from build_artifacts.compilation import EFFORT, Compilation, Effort
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.evaluation import data_digest
from build_artifacts.progress import Progress
from build_artifacts.recipe import Recipe, artifact_version
from build_artifacts.recipes import FULL
from build_artifacts.sources.hub import Hub, HuggingFaceHub
from build_artifacts.steps.resolve import resolve
from build_artifacts.steps.seal import Identity, build_tools, publish
from build_artifacts.storage.scratch import scratch
from build_artifacts.storage.workspace import build_place
from deployments.errors import ArtifactError, ManifestInvalid
from deployments.manifest import ArtifactManifest, Device, TaskName
from deployments.store import model_directory, point_latest
from deployments.tuning.host import this_host


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What is to be built, and into which store."""

    ref: str
    store: Path
    id: str | None = None
    task: TaskName | None = None
    adapter: Path | None = None
    recipe: Recipe = FULL
    effort: Effort = EFFORT
    force: bool = False  # build also what is already there
    revision: str | None = None  # refuse the source when it is not this one


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A version that is in the store now."""

    manifest: ArtifactManifest
    directory: Path
    was_there: bool


def build(request: BuildRequest, progress: Progress, *, hub: Hub | None = None) -> BuildResult:
    """Build `request`, unless the same build is in the store already. Raises BuildError.

    One build of a version at a time: another one waits, and then finds it. What an interrupted
    build has finished is not done again.
    """
    with scratch(request.store) as sources:
        with progress.step("resolve", request.ref) as step:
            checkpoint = resolve(request.ref, sources, hub or HuggingFaceHub())
            step.found(f"revision {checkpoint.source.revision[:20]}")
        adapter = read_adapter(request.adapter) if request.adapter else None
        tasks = tasks_of(checkpoint, adapter, request.task)
        identity = _identity(request, checkpoint, adapter, tasks[0])
        store, version = request.store, identity.version
        made_with = json.dumps([repr(request.effort), this_host(Device.CPU).fingerprint])
        with build_place(store, identity.id, version, progress, made_with=made_with) as place:
            found = sealed_already(store, identity.id, version)
            if found is not None and not request.force:
                point_latest(store, identity.id, version)
                return found
            run = Compilation(place, progress, request.recipe, request.effort)
            staged = run.artifact(checkpoint, adapter, tasks, identity)
            directory = publish(staged, store)
    return BuildResult(ArtifactManifest.read(directory), directory, was_there=False)


def sealed_already(store: Path, model_id: str, version: str) -> BuildResult | None:
    """The version, if it is in the store and every digest holds; a damaged one is built anew."""
    directory = model_directory(store, model_id) / version
    try:
        return BuildResult(ArtifactManifest.read(directory), directory, was_there=True)
    except ArtifactError:
        return None


def _identity(
    request: BuildRequest, checkpoint: Checkpoint, adapter: Adapter | None, task: TaskName
) -> Identity:
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
    return Identity(model_id, version, source, request.recipe.digest())


def planned_version(
    request: BuildRequest, revision: str, adapter_revision: str | None, task: TaskName
) -> str:
    """The version that building `request` gives, its source being at that revision.

    Raises BuildError when its labelled data cannot be read.
    """
    path, sampling = request.effort.evaluation, request.effort.sampling
    data = None if path is None else f"{data_digest(path)} {sampling}"
    tools = build_tools()
    return artifact_version(request.recipe, tools, revision, adapter_revision, task, data)
