"""Tests of the default model of a request that names none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.artifacts.types import TaskName
from deployments.config import ModelSettings
from deployments.ingress.models.resolver import RequestResolver
from deployments.ingress.requests import InferenceRequest
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER


@dataclass
class ListedModels:
    """A registry that only lists models."""

    models: list[RegisteredModel]

    def open_models(self, client: Callable[[], str] | None = None) -> Iterator[RegisteredModel]:
        return iter(self.models)


def change(model: RegisteredModel, name: str, **changes: Any) -> RegisteredModel:
    manifest = model.manifest.model_copy(update=changes)
    return replace(model, ref=model.ref._replace(id=name), manifest=manifest)


@pytest.fixture(scope="module")
def models(writing_store: Path) -> dict[str, RegisteredModel]:
    chat = ModelRegistry(writing_store, (ModelSettings(id=DECODER),)).find(DECODER)
    files = {k: v for k, v in chat.manifest.files.items() if k != CHAT_TEMPLATE_NAME}
    encoder = EncoderDecoderConfig(max_source_tokens=9, decoder_start_token_id=0)
    translating = chat.generation_config.model_copy(update={"encoder_decoder": encoder})
    return {
        "translator": change(chat, "translator", generation_config=translating, files=files),
        "writer": change(chat, "writer", files=files),
        "chat": change(chat, "chat"),
    }


def resolver(*models: RegisteredModel) -> RequestResolver:
    return RequestResolver(cast(ModelRegistry, ListedModels([*models])))


@pytest.mark.parametrize(
    ("served", "for_chat", "expected"),
    [
        (("translator", "writer", "chat"), True, "chat"),
        (("translator", "writer", "chat"), False, "writer"),
        (("translator", "writer"), True, "translator"),
        (("translator",), False, "translator"),
        (("chat", "writer"), False, "chat"),
    ],
)
def test_default_generator_fits_the_route(
    served: tuple[str, ...], for_chat: bool, expected: str, models: dict[str, RegisteredModel]
) -> None:
    found = resolver(*(models[name] for name in served)).find_generator(None, for_chat=for_chat)
    assert found.ref.id == expected


@pytest.mark.parametrize(
    ("task", "expected"), [(None, "writer"), (TaskName.FEATURE_EXTRACTION, EMBEDDER)]
)
def test_stream_of_a_text_goes_to_no_generator_if_it_names_a_task(
    task: TaskName | None,
    expected: str,
    models: dict[str, RegisteredModel],
    writing_store: Path,
) -> None:
    encoder = ModelRegistry(writing_store, (ModelSettings(id=EMBEDDER),)).find(EMBEDDER)
    request = InferenceRequest("Once upon a time", task=task)
    selection = resolver(models["writer"], encoder).select(
        request, may_generate=True, wants_text=True
    )
    assert selection.model.ref.id == expected
