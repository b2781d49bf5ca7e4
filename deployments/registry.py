"""Which models are served: ids and versions to manifests, read once and checked."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.store import model_directory, resolve_version
from deployments.artifacts.types import TaskName
from deployments.config import AppArgs, ModelSettings
from deployments.errors import ArtifactError, ManifestInvalid, ServeError, UnknownModel
from deployments.messages import ModelRef
from deployments.tasks import find_tasks

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model whose artifact passed every check."""

    ref: ModelRef
    manifest: ArtifactManifest
    directory: Path
    sealed_s: float  # seconds since the epoch
    tasks: tuple[TaskName, ...]  # what it can be asked, its own first

    @property
    def is_generative(self) -> bool:
        """Whether it writes text: such a model is a generator's, all others are the encoders'."""
        return self.manifest.generation_config is not None

    @property
    def generation_config(self) -> GenerationConfig:
        """How it generates; only to be asked of models that do."""
        if self.manifest.generation_config is None:
            raise AssertionError("this is a bug: a model that does not generate was asked to")
        return self.manifest.generation_config


class ModelRegistry:
    """The configured models. A damaged one is kept with its reason; the others serve.

    Ingress, tokenizer and encoders each read the same store, so they come to the same conclusions.
    """

    def __init__(self, store: Path, models: Iterable[ModelSettings]) -> None:
        self._entries: dict[str, RegisteredModel | ArtifactError] = {}
        for settings in models:
            try:
                self._entries[settings.id] = _open(store, settings)
            except ArtifactError as error:
                log.error("model %s refused: %s", settings.id, error)
                self._entries[settings.id] = error

    @classmethod
    def of(cls, args: AppArgs) -> ModelRegistry:
        """The registry of a replica."""
        return cls(args.store_path(), args.models)

    def open_models(self) -> Iterator[RegisteredModel]:
        """Every model that can be served, in the order of the configuration."""
        return (entry for entry in self._entries.values() if isinstance(entry, RegisteredModel))

    def load_each(
        self, load: Callable[[RegisteredModel], T], *, generating: bool | None = None
    ) -> tuple[dict[ModelRef, T], dict[ModelRef, ServeError]]:
        """`load` of every open model; one that cannot be loaded does not keep the others away.

        With `generating`, only of those that generate text, or that do not.
        """
        loaded: dict[ModelRef, T] = {}
        failed: dict[ModelRef, ServeError] = {}
        for model in self.open_models():
            if generating not in (None, model.is_generative):
                continue
            try:
                loaded[model.ref] = load(model)
            except ServeError as error:
                log.error("model %s cannot be loaded: %s", model.ref.id, error)
                # A copy, without what it was raised in: half a model, and the memory that it took.
                failed[model.ref] = copy.copy(error)
        return loaded, failed

    def refused(self) -> dict[str, ArtifactError]:
        """Model ids that cannot be served, and why."""
        return {k: e for k, e in self._entries.items() if isinstance(e, ArtifactError)}

    def find(self, model_id: str) -> RegisteredModel:
        """The model of that id. Raises UnknownModel, or the reason its artifact was refused."""
        entry = self._entries.get(model_id)
        if entry is None:
            raise UnknownModel(f"Model {model_id} does not exist", field="model")
        if isinstance(entry, ArtifactError):
            # A fresh exception each time, as below.
            raise type(entry)(f"Model {model_id} is refused: {entry.message}")
        return entry


def load_error(model: ModelRef, failed: Mapping[ModelRef, ServeError]) -> ServeError:
    """What a replica that did not load a model says to those who ask it for it."""
    error = failed.get(model)
    if error is None:
        return UnknownModel(f"Model {model.id} is not loaded here", field="model")
    return copy.copy(error)  # a shared one would gather tracebacks for ever


def _open(store: Path, settings: ModelSettings) -> RegisteredModel:
    version = resolve_version(store, settings.id, settings.version)
    directory = model_directory(store, settings.id) / version
    manifest = ArtifactManifest.read(directory)
    if (manifest.id, manifest.version) != (settings.id, version):
        raise ManifestInvalid(
            f"{directory}: the manifest is that of `{manifest.id}` version {manifest.version}"
        )
    sealed_s = (directory / MANIFEST_NAME).stat().st_mtime
    return RegisteredModel(
        ref=ModelRef(settings.id, version),
        manifest=manifest,
        directory=directory,
        sealed_s=sealed_s,
        tasks=find_tasks(manifest),
    )
