"""Translation with the source and target language as request parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.types import TaskName
from deployments.config import GeneratorSettings
from tests.support.encoder_decoder_artifacts import (
    LANGUAGES,
    MULTILINGUAL,
    SOURCE_TOKENS,
    TinyEncoderDecoder,
)
from tests.support.in_process import InProcess

TEXT = "the river rose over the road ."
PATH = f"/models/{MULTILINGUAL}"


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoderDecoder:
    return TinyEncoderDecoder.make(tmp_path_factory.mktemp("multilingual"), LANGUAGES)


@pytest.fixture
async def multilingual_http(
    multilingual: TinyEncoderDecoder, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    multilingual.seal(tmp_path, MULTILINGUAL, (TaskName.TRANSLATION,))
    settings = GeneratorSettings(kv_slots=4, max_context_tokens=64)
    server = InProcess(tmp_path, models=(MULTILINGUAL,), writes=settings)
    async with server.client() as client:
        yield client


def body(source: str | None, target: str | None, **parameters: Any) -> dict[str, Any]:
    languages = {"src_lang": source, "tgt_lang": target}
    return {"inputs": TEXT, "parameters": {**languages, **parameters}}


@pytest.mark.parametrize("parameters", [{}, {"num_beams": 3}])
@pytest.mark.parametrize(("source", "target"), [("en_XX", "fr_XX"), ("fr_XX", "de_DE")])
async def test_languages_of_a_request_give_the_output_of_transformers(
    source: str,
    target: str,
    parameters: dict[str, Any],
    multilingual_http: httpx.AsyncClient,
    multilingual: TinyEncoderDecoder,
) -> None:
    response = await multilingual_http.post(PATH, json=body(source, target, **parameters))
    expected = multilingual.translate(TEXT, source, target, **parameters)
    assert response.json() == [{"translation_text": expected}]


async def test_languages_select_different_outputs(
    multilingual_http: httpx.AsyncClient, multilingual: TinyEncoderDecoder
) -> None:
    texts = {
        (await multilingual_http.post(PATH, json=body(source, target))).text
        for source, target in (("en_XX", "fr_XX"), ("fr_XX", "fr_XX"), ("en_XX", "de_DE"))
    }
    assert len(texts) == 3
    default = await multilingual_http.post(PATH, json=body(None, None))
    assert default.json() == [{"translation_text": multilingual.answer(TEXT)}]


async def test_truncated_input_keeps_the_language_token(
    multilingual_http: httpx.AsyncClient, multilingual: TinyEncoderDecoder
) -> None:
    text = " ".join([TEXT] * SOURCE_TOKENS)
    request = body("de_DE", "fr_XX", truncation="longest_first") | {"inputs": text}
    response = await multilingual_http.post(PATH, json=request)
    expected = multilingual.translate(text, "de_DE", "fr_XX")
    assert response.json() == [{"translation_text": expected}]


@pytest.mark.parametrize(
    ("source", "target", "field", "message"),
    [
        ("en_XX", None, "tgt_lang", "Set both `src_lang` and `tgt_lang`"),
        (None, "fr_XX", "src_lang", "Set both `src_lang` and `tgt_lang`"),
        ("en", "fr_XX", "src_lang", "Known: `de_DE`, `en_XX`, `fr_XX`"),
        ("en_XX", "it_IT", "tgt_lang", "Known: `de_DE`, `en_XX`, `fr_XX`"),
    ],
)
async def test_invalid_languages_are_rejected_with_the_known_codes(
    source: str | None,
    target: str | None,
    field: str,
    message: str,
    multilingual_http: httpx.AsyncClient,
) -> None:
    response = await multilingual_http.post(PATH, json=body(source, target))
    assert (response.status_code, response.json()["field"]) == (400, f"parameters.{field}")
    assert message in response.json()["error"][0]


async def test_the_model_list_has_the_languages(multilingual_http: httpx.AsyncClient) -> None:
    assert (await multilingual_http.get(PATH)).json()["languages"] == sorted(LANGUAGES)
