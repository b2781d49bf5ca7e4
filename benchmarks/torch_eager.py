"""The model as PyTorch runs it without any of our work: eager, fp32, on the CPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.errors import BenchmarkError
from deployments.engines import Engine
from deployments.manifest import ArtifactManifest


def open_torch(
    source: str | None, manifest: ArtifactManifest, scratch: Path, threads: int
) -> Engine:
    """The model an artifact was built from, answering the same rows.

    `source` is what `build_artifacts build` takes; None: the manifest's own. What must be unpacked
    goes under `scratch`. Raises BenchmarkError or a BuildError.
    """
    from build_artifacts.checkpoints.facts import read_facts
    from build_artifacts.checkpoints.models import load_model
    from build_artifacts.journey.stages import Eager
    from build_artifacts.search.original import Original
    from build_artifacts.sources.hub import HuggingFaceHub
    from build_artifacts.steps.resolve import resolve

    checkpoint = resolve(source or own_source(manifest), scratch, HuggingFaceHub())
    facts = read_facts(checkpoint, manifest.tasks)
    model = load_model(checkpoint.weights, head=manifest.head, dtype="float32")
    return Eager(Original(model, facts), threads)


def own_source(manifest: ArtifactManifest) -> str:
    """Where the artifact's weights came from. Raises BenchmarkError for a merged adapter."""
    if manifest.source.adapter is not None:
        raise BenchmarkError(
            f"`{manifest.id}` was merged with an adapter, so its source is another model",
            hint="name a directory with the merged model: --torch DIR",
        )
    return manifest.source.ref
