"""The models that the key of the present request permits."""

from __future__ import annotations

from collections.abc import Iterator

from deployments.errors import ArtifactError
from deployments.keys.caller import current_caller
from deployments.registry import ModelRegistry, RegisteredModel


class PermittedModels:
    """The registry as the caller may see it: defaults and lists have permitted models only."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def open_models(self) -> Iterator[RegisteredModel]:
        may_use = current_caller().may_use_model
        return (model for model in self._registry.open_models() if may_use(model.ref.id))

    def rejected(self) -> dict[str, ArtifactError]:
        """Return the errors of the unusable models by model id."""
        may_use = current_caller().may_use_model
        return {k: e for k, e in self._registry.rejected().items() if may_use(k)}

    def find(self, model_id: str) -> RegisteredModel:
        """Return the model. Raises Forbidden, UnknownModel or the ArtifactError of the artifact."""
        current_caller().require_model(model_id)
        return self._registry.find(model_id)
