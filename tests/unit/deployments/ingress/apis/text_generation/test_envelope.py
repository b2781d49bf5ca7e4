"""Text generation through the Hugging Face routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.errors import InputTooLong
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    MODELS,
    TEXT,
    ScriptedGenerator,
    ask,
)

OWN_PATHS = (
    f"/models/{DECODER}",
    f"/models/{DECODER}/pipeline/text-generation",
    f"/pipeline/text-generation/{DECODER}",
)
DECODER_FIRST = (DECODER, EMBEDDER)


@pytest.mark.parametrize("path", OWN_PATHS)
async def test_one_prompt_returns_a_list_with_the_full_text(path: str, writing_store: Path) -> None:
    response = await ask(writing_store, ScriptedGenerator(), path, {"inputs": "Once"})
    assert (response.status_code, response.json()) == (200, [{"generated_text": "Once" + TEXT}])
    assert response.headers["x-generated-tokens"] == "4"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/invocations"])
@pytest.mark.parametrize(
    ("more", "models"),
    [
        ({"model": DECODER}, MODELS),
        ({}, MODELS),  # no encoder task has `max_new_tokens`
        ({}, DECODER_FIRST),  # the default is the first model, here the decoder
        ({}, (DECODER,)),
        ({"model": "tgi"}, (DECODER,)),
    ],
)
async def test_default_paths_use_the_generative_model(
    path: str, more: dict[str, Any], models: tuple[str, ...], writing_store: Path
) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 3}, **more}
    response = await ask(writing_store, ScriptedGenerator(), path, body, models=models)
    assert response.json() == [{"generated_text": "Once" + TEXT}]


@pytest.mark.parametrize(
    ("body", "models"),
    [
        ({"inputs": "good film"}, MODELS),
        ({"inputs": "good film", "stream": False}, MODELS),
        ({"inputs": "good film", "stream": None}, MODELS),
        ({"inputs": "good film", "stream": True, "model": EMBEDDER}, MODELS),
        ({"inputs": "good film", "stream": True}, (EMBEDDER,)),
        ({"inputs": "good film", "parameters": {"normalize": True}}, DECODER_FIRST),
        ({"inputs": "good film", "parameters": {"truncate": True}}, MODELS),
    ],
)
async def test_encoder_models_respond_unchanged(
    body: dict[str, Any], models: tuple[str, ...], writing_store: Path
) -> None:
    generator = ScriptedGenerator()
    response = await ask(writing_store, generator, "/", body, models=models)
    ((first, *_),) = response.json()
    assert isinstance(first, float)
    assert not generator.calls


async def test_similarity_inputs_are_not_continued(writing_store: Path) -> None:
    pair = {"source_sentence": "good film", "sentences": ["good film"]}
    for body in ({"inputs": pair}, pair, {"inputs": pair, "stream": True}):
        response = await ask(writing_store, ScriptedGenerator(), "/", body, models=DECODER_FIRST)
        assert response.json() == [pytest.approx(1, abs=1e-6)]


@pytest.mark.parametrize("body", ["Once", {"inputs": "Once"}])
async def test_a_bare_text_is_a_prompt(body: Any, writing_store: Path) -> None:
    response = await ask(writing_store, ScriptedGenerator(), f"/models/{DECODER}", body)
    assert response.json() == [{"generated_text": "Once" + TEXT}]


async def test_several_prompts_return_a_list_per_prompt(writing_store: Path) -> None:
    generator = ScriptedGenerator()
    body = {"inputs": ["Once", "Twice"], "parameters": {"details": True}}
    response = await ask(writing_store, generator, f"/models/{DECODER}", body)
    assert [[one["generated_text"] for one in answers] for answers in response.json()] == [
        ["Once" + TEXT],
        ["Twice" + TEXT],
    ]
    assert response.json()[0][0]["details"]["generated_tokens"] == 4
    assert (response.headers["x-prompt-tokens"], response.headers["x-generated-tokens"]) == (
        "4",
        "8",
    )
    assert response.headers["x-compute-characters"] == "9"


async def test_a_list_with_one_prompt_returns_a_nested_list(writing_store: Path) -> None:
    response = await ask(
        writing_store, ScriptedGenerator(), f"/models/{DECODER}", {"inputs": ["Once"]}
    )
    assert response.json() == [[{"generated_text": "Once" + TEXT}]]


async def test_several_sequences_have_different_seeds(writing_store: Path) -> None:
    generator = ScriptedGenerator()
    parameters = {"num_return_sequences": 2, "temperature": 0.5, "seed": 5, "details": True}
    body = {"inputs": ["Once", "Twice"], "parameters": parameters}
    response = await ask(writing_store, generator, f"/models/{DECODER}", body)
    result = [[one["details"]["seed"] for one in answers] for answers in response.json()]
    assert result == [[5, 6], [5, 6]]
    assert [one["generated_text"] for one in response.json()[1]] == ["Twice" + TEXT] * 2
    assert response.headers["x-prompt-tokens"] == "4", (
        "a prompt is read once, however often answered"
    )


async def test_errors_name_the_index_of_the_prompt(writing_store: Path) -> None:
    generator = ScriptedGenerator(refusal=InputTooLong("`prompt` has 9 tokens", field="prompt"))
    response = await ask(
        writing_store, generator, f"/models/{DECODER}", {"inputs": ["Once", "Twice"]}
    )
    assert response.status_code == 422
    assert response.json()["error"].startswith("`inputs[")


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "a", "parameters": {"temperature": 0}},
        {"inputs": "a", "stream": "yes"},
        {"inputs": ["a"], "stream": True},
        {"inputs": {"question": "a"}},
    ],
)
async def test_errors_have_an_error_type_of_huggingface_hub(body: Any, writing_store: Path) -> None:
    response = await ask(writing_store, ScriptedGenerator(), f"/models/{DECODER}", body)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/models/{DECODER}/pipeline/feature-extraction", 400),
        (f"/models/{EMBEDDER}/pipeline/text-generation", 400),
        (f"/models/{DECODER}/pipeline/summarization", 400),
        ("/models/no/such/pipeline/text-generation", 404),
    ],
)
async def test_unsupported_tasks_have_the_default_error_format(
    path: str, status: int, writing_store: Path
) -> None:
    response = await ask(writing_store, ScriptedGenerator(), path, {"inputs": "Once"})
    assert response.status_code == status
    assert "error_type" not in response.json()


async def test_model_list_has_the_task(writing_store: Path) -> None:
    async with InProcess(
        writing_store, models=MODELS, generator=ScriptedGenerator()
    ).client() as http:
        facts = (await http.get(f"/models/{DECODER}")).json()
    assert facts["tasks"] == ["text-generation"]
