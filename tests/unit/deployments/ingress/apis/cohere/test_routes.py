"""Tests of Cohere's embeddings."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.tasks.embedding import FeatureExtraction
from tests.support.artifacts import CLASSIFIER, EMBEDDER, WIDTH, seal_tiny
from tests.support.in_process import InProcess

TEXTS = ["night", "lovely food", "the river"]
V1, V2 = "/v1/embed", "/v2/embed"
LIMITS = IngressUserConfig(limits=LimitSettings(items=3))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("embedders")
    seal_tiny(store, EMBEDDER)
    seal_tiny(store, CLASSIFIER, labels=("NEGATIVE", "POSITIVE"))
    return store


async def embed(store: Path, path: str, **body: Any) -> Any:
    async with InProcess(store).client() as http:
        response = await http.post(path, json={"texts": TEXTS, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def embed_by_openai(store: Path, **body: Any) -> list[list[float]]:
    async with InProcess(store).client() as http:
        response = await http.post("/v1/embeddings", json={"input": TEXTS, **body})
    return [each["embedding"] for each in response.json()["data"]]


@pytest.mark.parametrize("path", [V2, f"/models/{EMBEDDER}{V2}"])
async def test_version_2_returns_embeddings_by_type(path: str, store: Path) -> None:
    content = await embed(store, path, input_type="search_document")
    assert content["embeddings"] == {"float": await embed_by_openai(store)}
    assert content["texts"] == TEXTS
    assert content["response_type"] == "embeddings_by_type"
    assert content["meta"]["api_version"] == {"version": "2"}
    assert content["meta"]["billed_units"]["input_tokens"] >= 2 * len(TEXTS)
    assert content["id"]


async def test_version_1_returns_a_list_unless_types_are_named(store: Path) -> None:
    content = await embed(store, V1)
    assert content["response_type"] == "embeddings_floats"
    assert content["embeddings"] == await embed_by_openai(store)
    assert content["meta"]["api_version"] == {"version": "1"}
    by_type = await embed(store, V1, embedding_types=["float"])
    assert by_type["response_type"] == "embeddings_by_type"
    assert by_type["embeddings"] == {"float": content["embeddings"]}


async def test_types_encode_the_same_embeddings(store: Path) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    vectors = (await embed(store, V2, embedding_types=types))["embeddings"]
    assert set(vectors) == set(types)
    floats = np.array(vectors["float"], np.float32)
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors["base64"]]
    assert np.array_equal(decoded, floats)
    assert (np.unpackbits(np.array(vectors["ubinary"], np.uint8), axis=1) == (floats > 0)).all()
    assert np.array_equal(np.array(vectors["binary"]) + 128, vectors["ubinary"])


async def test_output_dimension_shortens_the_embeddings(store: Path) -> None:
    content = await embed(store, V2, output_dimension=4)
    assert content["embeddings"]["float"] == await embed_by_openai(store, dimensions=4)


@pytest.mark.parametrize(
    ("truncate", "parameters"),
    [
        (None, {"truncate": True}),
        ("NONE", {"truncate": False}),
        ("START", {"truncate": True, "truncation_direction": "left"}),
        ("END", {"truncate": True, "truncation_direction": "right"}),
    ],
)
async def test_parameters_become_those_of_the_task(
    truncate: str | None,
    parameters: dict[str, Any],
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = []
    parse = FeatureExtraction.parse

    def record(self: FeatureExtraction, inputs: Any, given: Any, manifest: Any) -> Any:
        parsed.append(dict(given))
        return parse(self, inputs, given, manifest)

    monkeypatch.setattr(FeatureExtraction, "parse", record)
    await embed(store, V2, input_type="search_query", truncate=truncate)
    assert parsed[0] == {"normalize": True, "input_type": "search_query", **parameters}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"texts": None}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "night"}, "texts"),
        ({"texts": ["night", ""]}, "texts[1]"),
        ({"texts": ["night"] * 4}, "texts"),
        ({"images": ["data:image/png;base64,AA=="], "input_type": "image"}, "images"),
        ({"inputs": [{"content": []}]}, "inputs"),
        ({"input_type": "image"}, "input_type"),
        ({"embedding_types": ["float", "int8"]}, "embedding_types[1]"),
        ({"embedding_types": []}, "embedding_types"),
        ({"output_dimension": WIDTH + 1}, "output_dimension"),
        ({"output_dimension": 0}, "output_dimension"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"options": {"wait": 1}}, "options.wait"),
    ],
)
async def test_bad_body_is_refused_with_its_field(
    body: dict[str, Any], field: str, store: Path
) -> None:
    async with InProcess(store, settings=LIMITS).client() as http:
        response = await http.post(V2, json={"texts": TEXTS, **body})
    assert response.status_code in (400, 413, 422)
    content = response.json()
    assert content["error"]["param"] == field
    assert f"`{field.partition('[')[0]}" in content["message"]


async def test_model_without_embeddings_is_refused(store: Path) -> None:
    async with InProcess(store).client() as http:
        response = await http.post(V2, json={"texts": TEXTS, "model": CLASSIFIER})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_task")
