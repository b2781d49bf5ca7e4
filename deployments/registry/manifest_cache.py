"""The manifests in memory, which are read at the first use of a version."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from deployments.artifacts.manifest import sealed_ns
from deployments.artifacts.store import model_directory
from deployments.errors import ArtifactError
from deployments.messages import ModelRef
from deployments.registry.registered_model import RegisteredModel, open_model

MAX_MANIFESTS = 2_000  # limit of the manifests in memory, some 20 KB each


class ManifestCache:
    """Opened models of a store, and the errors of those that cannot be used."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._opened: OrderedDict[ModelRef, _Opened] = OrderedDict()

    def open(self, ref: ModelRef) -> RegisteredModel:
        """Return the model. Its manifest is read again only after the version is sealed again.

        A manifest whose file could not be read is also read again by the next call. Raises an
        ArtifactError if the version is missing or unusable.
        """
        sealed = sealed_ns(model_directory(self._store, ref.id) / ref.version)
        opened = self._opened.get(ref)
        if opened is None or opened.sealed_ns != sealed or opened.is_unread:
            opened = self._opened[ref] = _Opened(sealed, _try_open(self._store, ref))
        self._opened.move_to_end(ref)
        if len(self._opened) > MAX_MANIFESTS:
            self._opened.popitem(last=False)
        if isinstance(opened.model, ArtifactError):
            raise _describe_unusable(ref.id, opened.model)
        return opened.model

    def mark_unusable(self, model: RegisteredModel, error: ArtifactError) -> None:
        """Let `open` raise `error` for the version until it is sealed again."""
        self._opened[model.ref] = _Opened(sealed_ns(model.directory), error)


class _Opened(NamedTuple):
    """A model whose manifest was read, or the error that makes it unusable."""

    sealed_ns: int
    model: RegisteredModel | ArtifactError

    @property
    def is_unread(self) -> bool:
        """Whether a read failed that may succeed later, as with too many open files."""
        return isinstance(self.model, ArtifactError) and isinstance(self.model.__cause__, OSError)


def _try_open(store: Path, ref: ModelRef) -> RegisteredModel | ArtifactError:
    try:
        return open_model(store, ref)
    except ArtifactError as error:
        return error


def _describe_unusable(model_id: str, error: ArtifactError) -> ArtifactError:
    """Copy an error and add the model's name.

    The copy is needed because an exception object that is raised repeatedly collects tracebacks.
    """
    return type(error)(f"Model {model_id} is not usable: {error.message}")
