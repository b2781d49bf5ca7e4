"""The model of a sealed artifact, built again from its source up to the reference outputs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.demo import ALL_DEMO_MODELS
from build_artifacts.encoders.preparation import PreparedModel, cached_prepare, cached_prune
from build_artifacts.encoders.pruned import load_calibration
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource
from build_artifacts.families import read_metadata
from build_artifacts.pruning.prune import Pruning, describe_pruning
from build_artifacts.sources.hub import Hub
from build_artifacts.steps.convert_weights import convert_weights, merge_adapter
from build_artifacts.steps.resolve import pin_to_revision, resolve
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import ArtifactManifest, ModelSource, PruningSource
from deployments.host.machine import advise_install

# Packages of the torch model and of the export. A host that only serves has none of them.
_REQUIRED_PACKAGES = ("torch", "transformers", "onnx", "onnxscript")


def rebuild_checkpoint(
    manifest: ArtifactManifest, steps: StepRunner, hub: Hub, adapter: Path | None = None
) -> Checkpoint:
    """Resolve the source in the manifest again, convert its weights and merge its adapter.

    `adapter` is the directory of the adapter, which the manifest does not record. It may be None
    for an adapter of a demo model. Raises BuildError if a part is missing or has changed.
    """
    for package in _REQUIRED_PACKAGES:
        if find_spec(package) is None:
            raise BuildError(
                f"`{package}` is not installed",
                hint=advise_install("build,cpu"),
            )
    with steps.run_uncached("resolve", manifest.source.ref) as step:
        sources = steps.create_directory("sources")
        checkpoint = resolve(pin_to_revision(manifest.source), sources, hub)
        _check_revision("the checkpoint", checkpoint.source.revision, manifest.source.revision)
        step.set_outcome(f"revision {checkpoint.source.revision[:20]}")
    checkpoint = convert_weights(steps, checkpoint, manifest.tasks)
    if manifest.source.adapter is None:
        return checkpoint
    return merge_adapter(steps, checkpoint, find_adapter(manifest.source, adapter))


def rebuild_prepared(
    manifest: ArtifactManifest,
    steps: StepRunner,
    hub: Hub,
    adapter: Path | None = None,
    prune_data: Path | None = None,
) -> PreparedModel:
    """Prepare the model of `rebuild_checkpoint`, pruned as in the build.

    `prune_data` is the file that the build used. Without it, `find_pruning` searches for the file.
    Raises BuildError if a part is missing or has changed.
    """
    checkpoint = rebuild_checkpoint(manifest, steps, hub, adapter)
    metadata = read_metadata(checkpoint, manifest.tasks)
    prepared = cached_prepare(steps, checkpoint.weights, metadata, None)
    if (pruned := manifest.source.pruning) is None:
        return prepared
    pruning = find_pruning(pruned, prune_data)
    return cached_prune(steps, prepared, pruning.fraction, load_calibration(prepared, pruning))


def find_pruning(source: PruningSource, given: Path | None) -> Pruning:
    """Return the pruning that reproduces `source`, with the calibration file `given`.

    Without `given`, try a pruning without a file, then the files of the demo models. Raises
    SourceNotFound if no file has the digest that `source` records.
    """
    demo_data = dict.fromkeys(model.evaluation for model in ALL_DEMO_MODELS)
    for data in (given,) if given else (None, *filter(None, demo_data)):
        pruning = Pruning(fraction=source.fraction, data=data)
        if describe_pruning(pruning) == source:
            return pruning
    raise SourceNotFound(
        "the data that rated heads and channels are not those of the build",
        hint="pass the file of the build with `--prune-data FILE`",
    )


def find_adapter(source: ModelSource, given: Path | None) -> Adapter:
    """Read the adapter of `source` from `given`, else from the demo models.

    Raises SourceNotFound if its directory is unknown, UnsafeSource if its revision has changed.
    """
    demo_adapters = {
        model.adapter.name: model.adapter for model in ALL_DEMO_MODELS if model.adapter
    }
    directory = given or demo_adapters.get(source.adapter or "")
    if directory is None:
        raise SourceNotFound(
            f"the directory of the adapter `{source.adapter}` is not recorded",
            hint="pass `--adapter DIR`",
        )
    adapter = read_adapter(directory)
    _check_revision(f"the adapter in {directory}", adapter.revision, source.adapter_revision)
    return adapter


def _check_revision(name: str, actual: str, built_from: str | None) -> None:
    if actual != built_from:
        raise UnsafeSource(
            f"{name} has changed since the build: "
            f"revision {actual[:20]}, not {str(built_from)[:20]}",
            hint="build the model again",
        )
