"""The last step: candidates that passed become an artifact, published whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.search.gating import PassedGraph
from build_artifacts.search.preparation import Prepared
from build_artifacts.storage.scratch import BUILDING_NAME, dispose
from deployments.manifest import (
    MANIFEST_NAME,
    REFERENCE_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    Gate,
    SealedFile,
    Source,
)
from deployments.sealed_files import file_sha256
from deployments.store import model_directory, point_latest
from deployments.tuning.costs import CostTable, write_costs
from deployments.tuning.processors import installed_versions

_TOOLS = (
    "torch", "transformers", "peft", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "openvino", "nncf", "tokenizers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """What an artifact is called and what it was made from."""

    id: str
    version: str
    source: Source
    recipe_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """All that goes into an artifact."""

    identity: Identity
    prepared: Prepared
    graphs: tuple[PassedGraph, ...]  # those of a device in order, its portable default first
    gate: Gate
    tables: tuple[CostTable, ...]  # of this host


def assemble(sealing: Sealing, into: Path) -> None:
    """Lay out the artifact's files under `into`, with their digests in the manifest."""
    prepared, identity = sealing.prepared, sealing.identity
    facts, compaction = prepared.facts, prepared.compaction
    shutil.copyfile(prepared.weights / TOKENIZER_NAME, into / TOKENIZER_NAME)
    shutil.copyfile(prepared.reference_dir / REFERENCE_NAME, into / REFERENCE_NAME)
    (into / "graphs").mkdir()
    names = _graph_names(sealing.graphs)
    for source, name in names.items():
        shutil.copyfile(source, into / name)
    manifest = ArtifactManifest(
        id=identity.id,
        version=identity.version,
        tasks=facts.tasks,
        architecture=facts.architecture,
        max_tokens=facts.max_tokens,
        width=facts.width,
        labels=facts.labels,
        problem=facts.problem,
        pooling=facts.pooling,
        normalize=facts.normalize,
        prompts=dict(facts.prompts),
        default_prompt=facts.default_prompt,
        mask_token=facts.mask_token,
        pruned=None if compaction.is_empty else compaction.describe(),
        source=identity.source,
        gate=sealing.gate,
        scores=dict(prepared.scores),
        candidates=tuple(_candidate(passed, names[passed.graph]) for passed in sealing.graphs),
        files={
            name: _sealed(into / name)
            for name in (TOKENIZER_NAME, REFERENCE_NAME, *dict.fromkeys(names.values()))
        },
        built_with=build_tools() | {"recipe": identity.recipe_digest},
    )
    (into / MANIFEST_NAME).write_bytes(manifest.to_json())
    for table in sealing.tables:
        write_costs(into, table)


def publish(staged: Path, store: Path) -> Path:
    """Rename the artifact in `staged` into its place in the store and make it the latest version.

    For one build of the version at a time. A version that is there already is moved out of the
    way first, and for the instant between the two renames it does not exist.
    """
    manifest = ArtifactManifest.read(staged)
    directory = model_directory(store, manifest.id)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / manifest.version
    if target.exists():
        dispose(target, store / BUILDING_NAME)
    staged.rename(target)
    point_latest(store, manifest.id, manifest.version)
    return target


def _graph_names(graphs: Sequence[PassedGraph]) -> dict[Path, str]:
    """Where each graph file goes: candidates that run one graph in several ways share it."""
    names: dict[Path, str] = {}
    for passed in graphs:
        names.setdefault(passed.graph, f"graphs/{passed.recipe.name}{passed.graph.suffix}")
    return names


def _candidate(passed: PassedGraph, graph: str) -> Candidate:
    recipe = passed.recipe
    return Candidate(
        name=recipe.name,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        graph=graph,
        options=passed.spec.options,
        parity=passed.parity,
        scores=dict(passed.scores),
        kept_float=passed.kept,
    )


def _sealed(path: Path) -> SealedFile:
    return SealedFile(sha256=file_sha256(path), size=path.stat().st_size)


def build_tools() -> dict[str, str]:
    """Versions of what a build depends on besides this code; onnxruntime's by whichever name."""
    found = installed_versions(_TOOLS)
    if gpu := found.pop("onnxruntime-gpu", None):
        found["onnxruntime"] = gpu
    return found
