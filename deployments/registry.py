"""The served models: manifests by model id, read and checked once per replica."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.store import LATEST_NAME, find_artifact
from deployments.config import AppArgs, ModelSettings
from deployments.errors import (
    ArtifactError,
    HardwareUnavailable,
    ManifestInvalid,
    ServeError,
    UnknownModel,
    UnknownTask,
)
from deployments.messages import ModelRef
from deployments.tasks import find_tasks, list_task_names

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A configured model whose artifact passed every check."""

    ref: ModelRef
    manifest: ArtifactManifest
    directory: Path
    sealed_s: float  # seconds since the epoch
    tasks: tuple[str, ...]  # the model's own task first

    @property
    def is_generative(self) -> bool:
        """Generators serve generative models, encoders all others."""
        return self.manifest.generation_config is not None

    @property
    def generation_config(self) -> GenerationConfig:
        if self.manifest.generation_config is None:
            raise AssertionError("bug: the model is not generative")
        return self.manifest.generation_config


class ModelRegistry:
    """The configured models; a damaged artifact is kept as its error, the other models serve.

    Ingress, tokenizer, encoders and generators read the same store and see the same errors. A model
    with a pinned version must be usable: its error ends the start of the replica, so that a rollout
    keeps the replicas of the version before.
    """

    def __init__(self, store: Path, models: Iterable[ModelSettings]) -> None:
        """Raises ArtifactError for a pinned model."""
        self._entries: dict[str, RegisteredModel | ArtifactError] = {}
        self._pinned: set[str] = set()
        for settings in models:
            if settings.version != LATEST_NAME:
                self._pinned.add(settings.id)
            try:
                self._entries[settings.id] = _open(store, settings)
            except ArtifactError as error:
                log.error("model %s rejected: %s", settings.id, error)
                if settings.id in self._pinned:
                    raise
                self._entries[settings.id] = error

    @classmethod
    def of(cls, args: AppArgs) -> ModelRegistry:
        return cls(args.store_path(), args.models)

    def open_models(self) -> Iterator[RegisteredModel]:
        """Yield the usable models in the order of the configuration."""
        return (entry for entry in self._entries.values() if isinstance(entry, RegisteredModel))

    def load_each(
        self, load: Callable[[RegisteredModel], T], *, generative: bool | None = None
    ) -> tuple[dict[ModelRef, T], dict[ModelRef, ServeError]]:
        """Apply `load` to every usable model; return the results and the errors.

        `generative` restricts the models to generative or to other ones. Raises the error of a
        pinned model, unless it was not built for this hardware.
        """
        loaded: dict[ModelRef, T] = {}
        failed: dict[ModelRef, ServeError] = {}
        for model in self.open_models():
            if generative not in (None, model.is_generative):
                continue
            try:
                loaded[model.ref] = load(model)
            except ServeError as error:
                log.error("model %s cannot be loaded: %s", model.ref.id, error)
                if model.ref.id in self._pinned and not isinstance(error, HardwareUnavailable):
                    raise
                # A copy has no traceback, which would keep a half-loaded model in memory.
                failed[model.ref] = copy.copy(error)
        return loaded, failed

    def rejected(self) -> dict[str, ArtifactError]:
        """Return the errors of the unusable models by model id."""
        return {k: e for k, e in self._entries.items() if isinstance(e, ArtifactError)}

    def find(self, model_id: str) -> RegisteredModel:
        """Return the model. Raises UnknownModel, or the ArtifactError of its artifact."""
        entry = self._entries.get(model_id)
        if entry is None:
            raise UnknownModel(f"Model {model_id} does not exist", field="model")
        if isinstance(entry, ArtifactError):
            # A new exception: a shared one collects tracebacks.
            raise type(entry)(f"Model {model_id} is not usable: {entry.message}")
        return entry


def load_error(model: ModelRef, failed: Mapping[ModelRef, ServeError]) -> ServeError:
    """Return the error of calls for a model that this replica did not load."""
    error = failed.get(model)
    if error is None:
        return UnknownModel(f"Model {model.id} is not loaded here", field="model")
    return copy.copy(error)  # a shared exception collects tracebacks


def _open(store: Path, settings: ModelSettings) -> RegisteredModel:
    directory = find_artifact(store, settings.id, settings.version)
    manifest = ArtifactManifest.read(directory)
    if (manifest.id, manifest.version) != (settings.id, directory.name):
        raise ManifestInvalid(
            f"{directory}: the manifest belongs to `{manifest.id}` version {manifest.version}"
        )
    if unknown := [task for task in manifest.tasks if task not in list_task_names()]:
        raise UnknownTask(f"{directory}: this release does not serve the task `{unknown[0]}`")
    return RegisteredModel(
        ref=ModelRef(manifest.id, manifest.version),
        manifest=manifest,
        directory=directory,
        sealed_s=(directory / MANIFEST_NAME).stat().st_mtime,
        tasks=find_tasks(manifest),
    )
