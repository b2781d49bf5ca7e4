"""Registry of the models in the store: maps names to versions and reads their manifests."""

from __future__ import annotations

from deployments.registry.model_registry import ModelRegistry
from deployments.registry.registered_model import RegisteredModel, open_model

__all__ = ["ModelRegistry", "RegisteredModel", "open_model"]
