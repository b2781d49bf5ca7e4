"""A sealed version of a model, as its manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import ArtifactManifest, sealed_ns
from deployments.artifacts.store import find_artifact
from deployments.errors import ManifestInvalid, UnknownTask
from deployments.messages import ModelRef
from deployments.tasks import find_tasks, list_task_names


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A sealed version of a model whose manifest is valid."""

    ref: ModelRef
    manifest: ArtifactManifest
    directory: Path
    sealed_ns: int  # when it was sealed, in nanoseconds since the epoch
    tasks: tuple[str, ...]  # the model's own task first

    @property
    def is_generative(self) -> bool:
        """Whether generators serve the model. Encoders serve all other models."""
        return self.manifest.generation_config is not None

    @property
    def generation_config(self) -> GenerationConfig:
        if self.manifest.generation_config is None:
            raise AssertionError("bug: the model is not generative")
        return self.manifest.generation_config


def open_model(store: Path, ref: ModelRef) -> RegisteredModel:
    """Open an exact version by its manifest alone.

    Raises an ArtifactError if the store lacks the version or its manifest cannot be used.
    """
    directory = find_artifact(store, ref.id, ref.version)
    manifest = ArtifactManifest.parse(directory)
    if (manifest.id, manifest.version) != (ref.id, directory.name):
        raise ManifestInvalid(
            f"{ref.name}: the manifest belongs to `{manifest.id}` version {manifest.version}"
        )
    if unknown := [task for task in manifest.tasks if task not in list_task_names()]:
        raise UnknownTask(f"{ref.name}: this release does not serve the task `{unknown[0]}`")
    return RegisteredModel(
        ref=ref,
        manifest=manifest,
        directory=directory,
        sealed_ns=sealed_ns(directory),
        tasks=find_tasks(manifest),
    )
