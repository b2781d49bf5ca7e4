"""One build from request to published version: what it is called, and whether it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from build_artifacts.adapter import Adapter, read_adapter
from build_artifacts.checkpoint import Checkpoint
from build_artifacts.compilation import Compilation
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.facts import tasks_of
from build_artifacts.progress import Progress
from build_artifacts.recipe import RECIPE, Recipe, artifact_version
from build_artifacts.sources.hub import Hub, HuggingFaceHub
from build_artifacts.steps.resolve import resolve
from build_artifacts.steps.seal import Identity, publish
from build_artifacts.workspace import workspace
from deployments.errors import ArtifactError, ManifestInvalid
from deployments.manifest import (
    ArtifactManifest,
    TaskName,
    model_directory,
    point_latest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What is to be built, and into which store."""

    ref: str
    store: Path
    id: str | None = None
    task: TaskName | None = None
    adapter: Path | None = None
    force: bool = False  # build also what is already there
    revision: str | None = None  # refuse the source when it is not this one


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A version that is in the store now."""

    manifest: ArtifactManifest
    directory: Path
    was_there: bool


def build(
    request: BuildRequest,
    progress: Progress,
    *,
    hub: Hub | None = None,
    recipe: Recipe = RECIPE,
) -> BuildResult:
    """Build `request`, unless the same build is in the store already. Raises BuildError."""
    with workspace(request.store) as place:
        with progress.step("resolve", request.ref) as step:
            scratch = place.directory("source")
            checkpoint = resolve(request.ref, scratch, hub or HuggingFaceHub())
            step.found(f"revision {checkpoint.source.revision[:20]}")
        adapter = read_adapter(request.adapter) if request.adapter else None
        tasks = tasks_of(checkpoint, adapter, request.task)
        identity = _identity(request, checkpoint, adapter, tasks[0], recipe)
        found = sealed_already(request.store, identity.id, identity.version)
        if found is not None and not request.force:
            point_latest(request.store, identity.id, identity.version)
            return found
        run = Compilation(place, progress, recipe)
        staged = run.artifact(checkpoint, adapter, tasks, identity)
        # Somebody else may have published the same build meanwhile; theirs is as good.
        replace = request.force or not sealed_already(request.store, identity.id, identity.version)
        directory = publish(staged, request.store, replace=replace)
    return BuildResult(ArtifactManifest.read(directory), directory, was_there=False)


def sealed_already(store: Path, model_id: str, version: str) -> BuildResult | None:
    """The version, if it is in the store and every digest holds; a damaged one is built anew."""
    directory = model_directory(store, model_id) / version
    try:
        return BuildResult(ArtifactManifest.read(directory), directory, was_there=True)
    except ArtifactError:
        return None


def _identity(
    request: BuildRequest,
    checkpoint: Checkpoint,
    adapter: Adapter | None,
    task: TaskName,
    recipe: Recipe,
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
    return Identity(
        id=model_id,
        version=artifact_version(
            revision=source.revision,
            adapter_revision=source.adapter_revision,
            task=task,
            recipe=recipe,
        ),
        source=source,
        recipe_digest=recipe.digest(),
    )
