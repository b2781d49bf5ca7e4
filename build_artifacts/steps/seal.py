"""Last step of a build: writing the accepted candidates and their metadata as an artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from deployments.artifacts.manifest import (
    MANIFEST_NAME,
    ArtifactManifest,
    Candidate,
    FileDigest,
    Gate,
    ModelSource,
)
from deployments.artifacts.store import file_sha256
from deployments.host.machine import installed_versions
from deployments.tuning.costs import CostTable, write_costs

_TOOLS = (
    "torch", "transformers", "peft", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "onnxruntime-genai", "onnx-ir", "gguf", "openvino", "nncf", "bitsandbytes", "accelerate",
    "tokenizers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArtifactIdentity:
    """Id, version and source of an artifact, and the digest of its recipe."""

    id: str
    version: str
    source: ModelSource
    recipe_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactContents:
    """Metadata and files of an artifact of any family."""

    identity: ArtifactIdentity
    metadata: CheckpointMetadata
    candidates: tuple[Candidate, ...]  # by rank within each device, the default of the device first
    gate: Gate
    scores: Mapping[str, float]
    files: Mapping[str, Path]  # source files by their names in the artifact
    texts: Mapping[str, str] = field(default_factory=dict)  # contents of further files by name
    cost_tables: tuple[CostTable, ...] = ()  # measured on this host
    pruned: str | None = None  # what the build removed, as text


def write_artifact(contents: ArtifactContents, into: Path) -> None:
    """Write the files, the manifest with their digests, and the cost tables to `into`."""
    identity, metadata = contents.identity, contents.metadata
    for name, source in contents.files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, into / name)
    for name, text in contents.texts.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(text, encoding="utf-8")
    manifest = ArtifactManifest(
        id=identity.id,
        version=identity.version,
        tasks=metadata.tasks,
        architecture=metadata.architecture,
        max_tokens=metadata.max_tokens,
        truncation_side=metadata.truncation_side,
        output_width=metadata.output_width,
        token_width=metadata.token_width,
        labels=metadata.labels,
        problem_type=metadata.problem_type,
        pooling="splade" if metadata.splade else metadata.pooling,
        normalize=metadata.normalize,
        default_dimensions=metadata.default_dimensions,
        similarity=metadata.similarity,
        prompts=dict(metadata.prompts),
        default_prompt=metadata.default_prompt,
        pair_template=metadata.pair_template,
        mask_token=metadata.mask_token,
        generation_config=metadata.generation_config,
        pruned=contents.pruned,
        source=identity.source,
        gate=contents.gate,
        scores=dict(contents.scores),
        candidates=contents.candidates,
        files={name: _digest_file(into / name) for name in (*contents.files, *contents.texts)},
        built_with=read_tool_versions() | {"recipe": identity.recipe_digest},
    )
    (into / MANIFEST_NAME).write_bytes(manifest.to_json())
    for table in contents.cost_tables:
        write_costs(into, table)


def _digest_file(path: Path) -> FileDigest:
    return FileDigest(sha256=file_sha256(path), size=path.stat().st_size)


def read_tool_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the output of a build.

    `onnxruntime-gpu` counts as `onnxruntime`.
    """
    versions = installed_versions(_TOOLS)
    if gpu := versions.pop("onnxruntime-gpu", None):
        versions["onnxruntime"] = gpu
    return versions
