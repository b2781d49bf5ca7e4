"""Tokens of texts, prompts and conversations, and texts of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import GeneratorSettings, IngressUserConfig, LimitSettings
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess

USER = {"role": "user", "content": "the rain"}
CONTEXT = 200  # less than the model allows


@pytest.fixture
async def http(writing_store: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a server whose first model is an embedding model."""
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=CONTEXT)
    async with InProcess(writing_store, (EMBEDDER, DECODER), writes=writes).client() as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("prefix", ["", f"/models/{DECODER}"])
async def test_prompt_is_tokenized_as_completions_read_it(
    prefix: str, http: httpx.AsyncClient
) -> None:
    tokenized = await post(http, f"{prefix}/tokenize", {"prompt": "the rain"})
    assert tokenized["count"] == len(tokenized["tokens"]) > 0
    assert (tokenized["max_model_len"], tokenized["token_strs"]) == (CONTEXT, None)
    body = {"model": DECODER, "prompt": "the rain", "max_tokens": 1, "temperature": 0}
    completion = await post(http, "/v1/completions", body)
    assert tokenized["count"] == completion["usage"]["prompt_tokens"]
    by_ids = await post(http, "/v1/completions", {**body, "prompt": tokenized["tokens"]})
    assert by_ids["choices"][0]["text"] == completion["choices"][0]["text"]


@pytest.mark.parametrize("prefix", ["", f"/models/{DECODER}"])
async def test_detokenization_restores_the_prompt(prefix: str, http: httpx.AsyncClient) -> None:
    tokens = (await post(http, f"{prefix}/tokenize", {"prompt": "the rain"}))["tokens"]
    restored = await post(http, f"{prefix}/detokenize", {"tokens": tokens})
    assert restored == {"prompt": "the rain"}


async def test_conversation_is_tokenized_with_its_template(http: httpx.AsyncClient) -> None:
    tokenized = await post(http, "/tokenize", {"messages": [USER]})
    body = {"model": DECODER, "messages": [USER], "max_tokens": 1}
    answer = await post(http, "/v1/chat/completions", body)
    assert tokenized["count"] == len(tokenized["tokens"]) == answer["usage"]["prompt_tokens"]
    restored = await post(http, "/detokenize", {"tokens": tokenized["tokens"]})
    info = (await http.get("/tokenizer_info")).json()
    assert restored["prompt"].startswith(f"{info['bos_token']}user")
    assert "the rain" in restored["prompt"], "special tokens are part of the prompt"


async def test_model_in_the_body_chooses_the_tokenizer(http: httpx.AsyncClient) -> None:
    named = await post(http, "/tokenize", {"prompt": "good", "model": EMBEDDER})
    special = {"add_special_tokens": False}
    bare = await post(http, "/tokenize", {"prompt": "good", "model": EMBEDDER, **special})
    assert named["tokens"][1:-1] == bare["tokens"], "[CLS] and [SEP]"
    restored = await post(http, "/detokenize", {"tokens": named["tokens"], "model": EMBEDDER})
    assert restored == {"prompt": "[CLS] good [SEP]"}


async def test_version_in_the_path_is_kept(http: httpx.AsyncClient) -> None:
    latest = await post(http, f"/models/{DECODER}@latest/tokenize", {"prompt": "the rain"})
    assert latest == await post(http, "/tokenize", {"prompt": "the rain"})
    missing = await http.post(f"/models/{DECODER}@0123456789ab/tokenize", json={"prompt": "a"})
    assert missing.status_code == 404
    assert "`0123456789ab`" in missing.json()["error"]


async def test_texts_are_those_of_the_first_model(http: httpx.AsyncClient) -> None:
    (tokens,) = await post(http, "/tokenize", {"inputs": "good"})
    assert [token["text"] for token in tokens] == ["[CLS]", "good", "[SEP]"]


@pytest.mark.parametrize("path", ["/tokenizer_info", f"/models/{DECODER}/tokenizer_info"])
async def test_info_has_special_tokens_and_template(path: str, http: httpx.AsyncClient) -> None:
    info = (await http.get(path)).json()
    assert info["model_max_length"] == CONTEXT
    assert info["eos_token"] != info["bos_token"]
    assert "messages" in info["chat_template"]


async def test_info_of_an_encoder_has_no_template(http: httpx.AsyncClient) -> None:
    info = (await http.get("/tokenizer_info", params={"model": EMBEDDER})).json()
    assert (info["chat_template"], info["eos_token"]) == (None, None)


async def test_server_without_generator_tokenizes_prompts(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await post(http, "/tokenize", {"prompt": "good"}))["count"] == 3
        assert (await http.get("/tokenizer_info")).json()["chat_template"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/tokenize", {}, 422, "inputs"),
        ("/tokenize", {"prompt": ""}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 422, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, 422, "send `inputs` in place"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [USER], "add_generation_prompt": False}, 422, "prompt"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 422, "chat template"),
        ("/tokenize", {"messages": [USER], "model": EMBEDDER}, 424, "generates no text"),
        ("/detokenize", {}, 422, "tokens"),
        ("/detokenize", {"tokens": []}, 400, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, 422, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 422, "`tokens`"),
        ("/models/no/such/tokenize", {"prompt": "a"}, 404, "no/such"),
    ],
)
async def test_error_names_the_field_of_the_body(
    path: str, body: dict[str, Any], status: int, reason: str, http: httpx.AsyncClient
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    assert reason in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/tokenize", {"inputs": ["a"] * 4}, 422, "Validation"),
        ("/tokenize", {"inputs": ["a" * 300, "b" * 300]}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "poem"}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [[]]}, 400, "Empty"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": ["a"]}, 422, "Validation"),
        ("/decode", {"ids": "a"}, 422, "Validation"),
        ("/decode", {"ids": [10**6]}, 422, "Validation"),
        ("/decode", {"ids": [2**63]}, 422, "Validation"),
        ("/decode", {"ids": [[1]] * 4}, 422, "Validation"),
        ("/decode", {"ids": [1] * 501}, 422, "Validation"),
    ],
)
async def test_limits_and_wrong_types_have_tei_errors(
    path: str, body: dict[str, Any], status: int, kind: str, tiny_store: Path
) -> None:
    limits = LimitSettings(items=3, body_bytes=2_000, item_chars=500)
    server = InProcess(tiny_store, settings=IngressUserConfig(limits=limits))
    async with server.client() as http:
        response = await http.post(path, json=body)
    error = response.json()
    assert (response.status_code, error["error_type"]) == (status, kind)
    assert "`parameters." not in error["error"], "the client has no `parameters`"
