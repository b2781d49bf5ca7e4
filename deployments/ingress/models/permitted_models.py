"""View of the model registry that shows only what the API key of the current request permits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from deployments.errors import ArtifactError, ArtifactMissing, ServeError, UnknownModel
from deployments.ingress.client_identity import current_client
from deployments.keys.caller import current_caller
from deployments.plan.resolution import split_name
from deployments.registry import ModelRegistry, RegisteredModel


class PermittedModels:
    """View of the registry: lists, defaults and `find` have only models that the caller may use."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._names: Mapping[str, str] = {}

    def configure(self, names: Mapping[str, str]) -> None:
        """Set the names that stand for an id or `id@selector`, by name."""
        self._names = names

    def list_names(self) -> list[str]:
        """Return the names of models that the caller may use."""
        may_use = current_caller().may_use_model
        return [name for name, target in self._names.items() if may_use(split_name(target)[0])]

    @property
    def configured(self) -> Mapping[str, str]:
        """The version or `latest` of each model id, as the configuration states it."""
        return self._registry.configured

    def open_models(self) -> Iterator[RegisteredModel]:
        may_use = current_caller().may_use_model
        models = self._registry.open_models(_identify_client)
        return (model for model in models if may_use(model.ref.id))

    def has_usable_model(self) -> bool:
        """Return whether any model can be used, without regard to the caller."""
        return self._registry.has_usable_model()

    def list_kept_loaded(self) -> list[RegisteredModel]:
        """Return the models that replicas keep in memory, without regard to the caller."""
        return self._registry.list_kept_loaded()

    def rejected(self) -> dict[str, ArtifactError]:
        """Return the errors of the unusable models that the caller may use, by model id."""
        may_use = current_caller().may_use_model
        return {name: error for name, error in self._registry.rejected().items() if may_use(name)}

    def find(self, name: str) -> RegisteredModel:
        """Return the model to which `name`, an id or `id@selector`, resolves for the caller.

        A name of the configuration stands for one of these. Raises Forbidden, UnknownModel or
        ArtifactError.
        """
        name = self._names.get(name, name)
        model_id = split_name(name)[0]
        current_caller().require_model(model_id)
        try:
            return self._registry.find(name, _identify_client)
        except (UnknownModel, ArtifactMissing) as error:
            error.model_id = model_id  # lets the request wait for a build of this model
            raise

    def serves(self, name: str) -> bool:
        """Return whether `find` finds a model."""
        try:
            self.find(name)
        except ServeError:
            return False
        return True

    def list_versions(self, model_id: str) -> list[RegisteredModel]:
        """Return the usable versions of a model, the newest first.

        A version that failed its trial is omitted, although requests may still name it. Raises
        Forbidden, or ManifestInvalid for an invalid id.
        """
        current_caller().require_model(model_id)
        return self._registry.list_versions(model_id)


def _identify_client() -> str:
    """Return the name of the client, or a random name if the client is unknown.

    A traffic split chooses the version by this name: with a random one, at random for each request.
    """
    return current_client() or os.urandom(8).hex()
