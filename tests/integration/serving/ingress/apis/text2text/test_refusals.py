"""Text2text requests that the ingress rejects without a call of the generator."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.serving.ingress.apis.text2text.test_tasks import RIVER
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.encoder_decoder_artifacts import SUMMARIZER, TRANSLATOR, WRITER


@pytest.mark.parametrize(
    ("path", "known"),
    [
        (f"/models/{TRANSLATOR}/pipeline/summarization", "`translation`"),
        (f"/pipeline/text-generation/{SUMMARIZER}", "`summarization`, `text2text-generation`"),
        (f"/models/{DECODER}/pipeline/summarization", "`text-generation`"),
        (f"/models/{WRITER}/pipeline/fill-mask", "`summarization`, `translation`"),
        (f"/models/{EMBEDDER}/pipeline/translation", "`feature-extraction`"),
    ],
)
async def test_unsupported_task_is_rejected_with_the_supported_tasks(
    path: str, known: str, client_without_generator: httpx.AsyncClient
) -> None:
    response = await client_without_generator.post(path, json={"inputs": RIVER})
    assert (response.status_code, response.json()["code"]) == (400, "wrong_task")
    assert known in response.json()["error"]


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"src_lang": "en"}, "src_lang"),
        ({"tgt_lang": "de"}, "tgt_lang"),
        ({"src_lang": "en", "tgt_lang": "de"}, "src_lang"),
        ({"num_beams": 2, "do_sample": True}, "num_beams"),
        ({"num_beams": 2, "stop": ["a"]}, "num_beams"),
        ({"num_beams": 2, "details": True}, "num_beams"),
        ({"num_beams": 2, "frequency_penalty": 1.5}, "num_beams"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_return_sequences"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"max_length": 1}, "max_length"),
        ({"min_length": 9, "max_length": 5}, "min_length"),
        ({"min_new_tokens": 9, "max_new_tokens": 5}, "min_new_tokens"),
        ({"truncation": "only_second"}, "truncation"),
        ({"truncation": "all"}, "truncation"),
        ({"generate_kwargs": 3}, "generate_kwargs"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_invalid_parameters_are_rejected_by_name(
    parameters: dict[str, Any], field: str, client_without_generator: httpx.AsyncClient
) -> None:
    response = await client_without_generator.post(
        f"/models/{WRITER}", json={"inputs": RIVER, "parameters": parameters}
    )
    assert (response.status_code, response.json()["code"]) == (400, "invalid_field")
    assert response.json()["field"] == f"parameters.{field}"
    assert f"`parameters.{field}`" in response.json()["error"][0]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_field"),
        ({"inputs": ""}, 400, "empty_input"),
        ({"inputs": []}, 400, "empty_input"),
        ({"inputs": {"text": RIVER}}, 400, "invalid_field"),
        ({"inputs": RIVER, "stream": "yes"}, 400, "invalid_field"),
        ({"inputs": RIVER, "parameters": {"beams": 2}}, 422, "unknown_parameter"),
        ({"inputs": RIVER, "beams": 2}, 422, "unknown_parameter"),
    ],
)
async def test_invalid_body_is_rejected(
    body: Any, status: int, code: str, client_without_generator: httpx.AsyncClient
) -> None:
    response = await client_without_generator.post(f"/models/{WRITER}", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code)


async def test_streaming_with_beams_is_rejected(
    client_without_generator: httpx.AsyncClient,
) -> None:
    body = {"inputs": RIVER, "parameters": {"num_beams": 2}, "stream": True}
    response = await client_without_generator.post(f"/models/{WRITER}", json=body)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert "`parameters.num_beams` must be 1" in response.json()["error"]


async def test_model_list_has_the_tasks(
    client_without_generator: httpx.AsyncClient,
) -> None:
    facts = (await client_without_generator.get(f"/models/{SUMMARIZER}")).json()
    assert facts["tasks"] == ["summarization", "text2text-generation"]
