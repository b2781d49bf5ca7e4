"""Step 6: candidates that passed become an artifact, published whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from build_artifacts.facts import ModelFacts
from build_artifacts.recipe import CandidateRecipe
from deployments.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    Parity,
    SealedFile,
    Source,
    file_sha256,
    model_directory,
    point_latest,
)

_TOOLS = ("torch", "transformers", "peft", "onnx", "onnxscript", "onnxruntime", "tokenizers")


@dataclass(frozen=True, slots=True)
class PassedGraph:
    """A graph that passed the gate, still in the workspace."""

    recipe: CandidateRecipe
    graph: Path
    parity: Parity


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an artifact is called and what it was made from."""

    id: str
    version: str
    source: Source
    recipe_digest: str


def assemble(
    identity: Identity,
    facts: ModelFacts,
    graphs: Sequence[PassedGraph],
    tokenizer: Path,
    into: Path,
) -> None:
    """Lay out the artifact's files under `into`, with their digests in the manifest."""
    shutil.copyfile(tokenizer, into / TOKENIZER_NAME)
    (into / "graphs").mkdir()
    names = [TOKENIZER_NAME]
    for passed in graphs:
        names.append(_graph_name(passed.recipe))
        shutil.copyfile(passed.graph, into / names[-1])
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
        source=identity.source,
        candidates=tuple(_candidate(passed) for passed in graphs),
        files={name: _sealed(into / name) for name in names},
        built_with=_tools() | {"recipe": identity.recipe_digest},
    )
    (into / MANIFEST_NAME).write_bytes(manifest.to_json())


def publish(staged: Path, store: Path, *, replace: bool) -> Path:
    """Rename the artifact in `staged` into its place in the store and make it the latest version.

    A version that is there already is kept, unless `replace`: then it is moved out of the way
    first, and for the instant between the two renames the version does not exist.
    """
    manifest = ArtifactManifest.read(staged)
    directory = model_directory(store, manifest.id)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / manifest.version
    if target.exists() and replace:
        target.rename(staged.with_name("replaced"))
    if not target.exists():
        staged.rename(target)
    point_latest(store, manifest.id, manifest.version)
    return target


def _graph_name(recipe: CandidateRecipe) -> str:
    return f"graphs/{recipe.name}.onnx"


def _candidate(passed: PassedGraph) -> Candidate:
    return Candidate(
        name=passed.recipe.name,
        device=passed.recipe.device,
        precision=passed.recipe.precision,
        graph=_graph_name(passed.recipe),
        disabled_optimizers=passed.recipe.disabled_optimizers,
        parity=passed.parity,
    )


def _sealed(path: Path) -> SealedFile:
    return SealedFile(sha256=file_sha256(path), size=path.stat().st_size)


def _tools() -> dict[str, str]:
    versions = {}
    for tool in _TOOLS:
        # onnxruntime may be installed as onnxruntime-gpu.
        for name in (tool, f"{tool}-gpu"):
            try:
                versions[tool] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return versions
