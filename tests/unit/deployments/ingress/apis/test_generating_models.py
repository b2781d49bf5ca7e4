"""Tests of generative models on the routes for all models and on encoder routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import GeneratorSettings
from deployments.ingress.models.permitted_models import PermittedModels
from deployments.registry import RegisteredModel
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess

TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
MODEL_SETS = {"with others": (EMBEDDER, DECODER), "alone": (DECODER,)}


@pytest.fixture(params=MODEL_SETS)
async def http(
    request: pytest.FixtureRequest, writing_store: Path
) -> AsyncIterator[httpx.AsyncClient]:
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=200)
    async with InProcess(writing_store, MODEL_SETS[request.param], writes=writes).client() as http:
        yield http


async def test_generative_model_is_listed_with_its_task(http: httpx.AsyncClient) -> None:
    for path in (f"/models/{DECODER}", f"/models/{DECODER}/info", f"/v1/models/{DECODER}"):
        entry = (await http.get(path)).json()
        assert (entry["id"], entry["state"]) == (DECODER, "ready")
        assert entry["tasks"] == ["text-generation"]
        assert (entry["max_tokens"], entry["max_model_len"]) == (256, 200)
        assert entry["devices"]["cpu"].pop("size_bytes") > 0
        assert entry["devices"] == {
            "cpu": {
                "compute_type": "cpu-fp32",
                "candidate": "tiny-cpu",
                "precision": "fp32",
                "available": True,
                "replicas": 1,
            }
        }
    for path in ("/models", "/v1/models"):
        listed = (await http.get(path)).json()["data"]
        assert DECODER in {one["id"] for one in listed}


async def test_generative_model_is_loaded_and_healthy(http: httpx.AsyncClient) -> None:
    status = (await http.get(f"/status/{DECODER}")).json()
    assert (status["loaded"], status["compute_type"]) == (True, "cpu")
    for path in ("/ready", f"/models/{DECODER}/health", f"/v2/models/{DECODER}/ready", "/info"):
        assert (await http.get(path)).status_code == 200, path
    index = (await http.post("/v2/repository/index")).json()
    assert DECODER in {one["name"] for one in index if one["state"] == "READY"}
    assert (await http.post(f"/v2/repository/models/{DECODER}/load")).status_code == 200
    assert (await http.get(f"/v2/models/{DECODER}/stats")).status_code == 200


@pytest.mark.parametrize("prefix", ["", f"/models/{DECODER}"])
async def test_generative_model_supports_tokenize_and_decode(
    prefix: str, http: httpx.AsyncClient
) -> None:
    body = {"model": DECODER, "inputs": "the rain"}
    ((*tokens,),) = (await http.post(f"{prefix}/tokenize", json=body)).json()
    assert "".join(token["text"] for token in tokens) == "the rain"
    ids = [token["id"] for token in tokens]
    decoded = await http.post(f"{prefix}/decode", json={"model": DECODER, "ids": ids})
    assert decoded.json() == ["the rain"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/v2/models/{DECODER}", None),
        (f"/v2/models/{DECODER}/config", None),
        (f"/v2/models/{DECODER}/infer", {"inputs": [TENSOR]}),
        (f"/models/{DECODER}/embed", {"inputs": "a"}),
        (f"/models/{DECODER}/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "texts": ["b"], "model": DECODER}),
        ("/classify", {"input": ["a"], "model": DECODER}),
    ],
)
async def test_encoder_routes_reject_a_generative_model_with_its_routes(
    path: str, body: Mapping[str, Any] | None, http: httpx.AsyncClient
) -> None:
    response = await (http.get(path) if body is None else http.post(path, json=body))
    assert response.status_code in (400, 424)
    assert "generates text. Call /v1/chat/completions" in response.text


async def test_only_generative_model_is_the_default(writing_store: Path) -> None:
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=200)
    async with InProcess(writing_store, (DECODER,), writes=writes).client() as http:
        assert (await http.get("/info")).json()["model_id"] == DECODER
        ((token,),) = (await http.post("/tokenize", json={"inputs": "the"})).json()
        assert token["text"] == "the"
        body = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
        assert (await http.post("/", json=body)).json()[0]["generated_text"].startswith("a")


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PROMPT = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "model": DECODER}),
        ("/v1/chat/completions", {**CHAT, "model": DECODER, "stream": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "model": DECODER}),
        ("/v1/messages", {**CHAT, "model": DECODER}),
        ("/v1/messages/count_tokens", {**CHAT, "model": DECODER}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "model": DECODER}),
        (f"/models/{DECODER}/generate", PROMPT),
        (f"/models/{DECODER}/generate_stream", PROMPT),
        (f"/models/{DECODER}", PROMPT),
        (f"/models/{DECODER}", {**PROMPT, "stream": True}),
    ],
)
async def test_model_is_found_once_per_request(
    path: str,
    body: Mapping[str, Any],
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = []
    find = PermittedModels.find

    def count(models: PermittedModels, name: str) -> RegisteredModel:
        names.append(name)
        return find(models, name)

    monkeypatch.setattr(PermittedModels, "find", count)
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert names == [DECODER]
