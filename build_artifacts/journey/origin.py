"""The checkpoint that an artifact was made from, found again and made ready as the build did it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from build_artifacts.checkpoints.adapter import Adapter, read_adapter
from build_artifacts.checkpoints.facts import read_facts
from build_artifacts.demo import DEMO_MODELS
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource
from build_artifacts.search.preparation import Prepared, merged_once, prepared_once
from build_artifacts.sources.hub import Hub
from build_artifacts.steprunner import StepRunner
from build_artifacts.steps.resolve import resolve
from deployments.manifest import ArtifactManifest, Source

# What `torch` and the graphs exported from it take; a host that only serves has none of them.
_NEEDED = ("torch", "transformers", "onnx", "onnxscript")


def recover(
    manifest: ArtifactManifest, steps: StepRunner, sources: Path, hub: Hub, adapter: Path | None
) -> Prepared:
    """The original, its adapter merged, from where the manifest says it came from.

    What has to be unpacked goes under `sources`; `adapter` is where the adapter lies, which the
    manifest does not say. Raises BuildError when anything is missing or is not what it was.
    """
    for package in _NEEDED:
        if find_spec(package) is None:
            raise BuildError(
                f"`{package}` is not installed", hint="run `pip install 'hundredfold[build,cpu]'`"
            )
    with steps.passing("resolve", manifest.source.ref) as step:
        checkpoint = resolve(manifest.source.ref, sources, hub)
        _check_revision("the checkpoint", checkpoint.source.revision, manifest.source.revision)
        step.found(f"revision {checkpoint.source.revision[:20]}")
    if manifest.source.adapter is not None:
        checkpoint = merged_once(steps, checkpoint, find_adapter(manifest.source, adapter))
    facts = read_facts(checkpoint, manifest.tasks)
    return prepared_once(steps, checkpoint.weights, facts, None)


def find_adapter(source: Source, given: Path | None) -> Adapter:
    """The adapter of that name and revision: `given`, or one of those of the demo models."""
    known = {model.adapter.name: model.adapter for model in DEMO_MODELS if model.adapter}
    directory = given or known.get(source.adapter or "")
    if directory is None:
        raise SourceNotFound(
            f"where the adapter `{source.adapter}` lies is not recorded",
            hint="pass `--adapter DIR`",
        )
    adapter = read_adapter(directory)
    _check_revision(f"the adapter in {directory}", adapter.revision, source.adapter_revision)
    return adapter


def _check_revision(what: str, found: str, built_from: str | None) -> None:
    if found != built_from:
        raise UnsafeSource(
            f"{what} has changed since the build: "
            f"revision {found[:20]}, not {str(built_from)[:20]}",
            hint="build the model again",
        )


def weights_bytes(directory: Path) -> int:
    """Size of the weights of a checkpoint."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
