"""Models in the form of Anthropic's Models API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from deployments.ingress.apis.anthropic.schemas import AnthropicModel, AnthropicModelPage
from deployments.ingress.apis.shared.model_list import ModelPage


def build_anthropic_model(facts: Mapping[str, Any]) -> AnthropicModel:
    """Build the object of a model from OpenAI's."""
    return AnthropicModel(
        type="model",
        id=facts["id"],
        display_name=facts["id"],
        created_at=datetime.fromtimestamp(facts["created"], UTC).isoformat(),
        lifecycle="active",
    )


def build_anthropic_page(page: ModelPage) -> AnthropicModelPage:
    models = [build_anthropic_model(facts) for facts in page.models]
    return AnthropicModelPage(
        data=models,
        has_more=page.has_more,
        first_id=models[0]["id"] if models else None,
        last_id=models[-1]["id"] if models else None,
    )
