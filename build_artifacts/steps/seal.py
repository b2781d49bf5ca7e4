"""The last step: candidates that passed become an artifact, published whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.search.gate import AcceptedGraph
from build_artifacts.search.preparation import PreparedModel
from deployments.artifacts.manifest import (
    MANIFEST_NAME,
    REFERENCE_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    FileDigest,
    Gate,
    ModelSource,
)
from deployments.artifacts.store import (
    file_sha256,
)
from deployments.machine import installed_versions
from deployments.tuning.costs import CostTable, write_costs

_TOOLS = (
    "torch", "transformers", "peft", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "onnxruntime-genai", "onnx-ir", "gguf", "openvino", "nncf", "bitsandbytes", "accelerate",
    "tokenizers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArtifactIdentity:
    """What an artifact is called and what it was made from."""

    id: str
    version: str
    source: ModelSource
    recipe_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactContents:
    """An artifact of any kind: what its manifest says, and its files."""

    identity: ArtifactIdentity
    metadata: CheckpointMetadata
    candidates: tuple[Candidate, ...]  # those of a device in order, its portable default first
    gate: Gate
    scores: Mapping[str, float]
    files: Mapping[str, Path]  # by their names in the artifact; copied, unless they lie there
    pruned: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArtifact:
    """All that goes into the artifact of an encoder."""

    identity: ArtifactIdentity
    prepared: PreparedModel
    graphs: tuple[AcceptedGraph, ...]  # those of a device in order, its portable default first
    gate: Gate
    tables: tuple[CostTable, ...]  # of this host


def assemble(artifact: EncoderArtifact, into: Path) -> None:
    """Lay out the artifact's files under `into`, with their digests in the manifest."""
    prepared, compaction = artifact.prepared, artifact.prepared.compaction
    names = _name_graphs(artifact.graphs)
    contents = ArtifactContents(
        identity=artifact.identity,
        metadata=prepared.metadata,
        candidates=tuple(
            _candidate(accepted, names[accepted.graph]) for accepted in artifact.graphs
        ),
        gate=artifact.gate,
        scores=prepared.scores,
        files={
            TOKENIZER_NAME: prepared.weights / TOKENIZER_NAME,
            REFERENCE_NAME: prepared.reference_dir / REFERENCE_NAME,
            **{name: source for source, name in names.items()},
        },
        pruned=None if compaction.is_empty else compaction.describe(),
    )
    write_artifact(contents, into)
    for table in artifact.tables:
        write_costs(into, table)


def write_artifact(contents: ArtifactContents, into: Path) -> None:
    """Copy the files to their places under `into`, and write the manifest with their digests."""
    identity, metadata = contents.identity, contents.metadata
    for name, source in contents.files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        if source != into / name:
            shutil.copyfile(source, into / name)
    manifest = ArtifactManifest(
        id=identity.id,
        version=identity.version,
        tasks=metadata.tasks,
        architecture=metadata.architecture,
        max_tokens=metadata.max_tokens,
        output_width=metadata.output_width,
        labels=metadata.labels,
        problem_type=metadata.problem_type,
        pooling=metadata.pooling,
        normalize=metadata.normalize,
        prompts=dict(metadata.prompts),
        default_prompt=metadata.default_prompt,
        mask_token=metadata.mask_token,
        generation_config=metadata.generation_config,
        pruned=contents.pruned,
        source=identity.source,
        gate=contents.gate,
        scores=dict(contents.scores),
        candidates=contents.candidates,
        files={name: _digest_file(into / name) for name in contents.files},
        built_with=read_tool_versions() | {"recipe": identity.recipe_digest},
    )
    (into / MANIFEST_NAME).write_bytes(manifest.to_json())


def _name_graphs(graphs: Sequence[AcceptedGraph]) -> dict[Path, str]:
    """Where each graph file goes: candidates that run one graph in several ways share it."""
    names: dict[Path, str] = {}
    for accepted in graphs:
        names.setdefault(accepted.graph, f"graphs/{accepted.recipe.name}{accepted.graph.suffix}")
    return names


def _candidate(accepted: AcceptedGraph, graph: str) -> Candidate:
    recipe = accepted.recipe
    return Candidate(
        name=recipe.name,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        graph=graph,
        options=accepted.spec.options,
        parity=accepted.parity,
        scores=dict(accepted.scores),
        excluded_nodes=accepted.kept,
    )


def _digest_file(path: Path) -> FileDigest:
    return FileDigest(sha256=file_sha256(path), size=path.stat().st_size)


def read_tool_versions() -> dict[str, str]:
    """Versions of what a build depends on besides this code; onnxruntime's by whichever name."""
    found = installed_versions(_TOOLS)
    if gpu := found.pop("onnxruntime-gpu", None):
        found["onnxruntime"] = gpu
    return found
