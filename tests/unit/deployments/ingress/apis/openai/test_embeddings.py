from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.config import IngressUserConfig, LimitSettings
from tests.support.artifacts import CLASSIFIER, EMBEDDER, WIDTH
from tests.support.in_process import InProcess

PATH = "/v1/embeddings"
WHOLE = {"model": EMBEDDER, "truncate": False}
TOO_LONG = "good " * 20  # 22 tokens; the maximum is 16


async def test_embeddings_return_objects_with_usage(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(PATH, json={"input": ["good film", "night"], "model": EMBEDDER})
    body = response.json()
    assert body["object"] == "list"
    assert body["model"] == EMBEDDER
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(e["object"], e["index"]) for e in body["data"]] == [("embedding", 0), ("embedding", 1)]
    rows = np.array([e["embedding"] for e in body["data"]], dtype=np.float32)
    assert rows.shape == (2, WIDTH)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-6)


async def test_base64_contains_the_same_floats(tiny_store: Path) -> None:
    body = {"input": ["good film", "night"], "model": EMBEDDER}
    async with InProcess(tiny_store).client() as http:
        floats = (await http.post(PATH, json=body)).json()["data"]
        packed = (await http.post(PATH, json=body | {"encoding_format": "base64"})).json()["data"]
    for plain, coded in zip(floats, packed, strict=True):
        unpacked = np.frombuffer(base64.b64decode(coded["embedding"]), dtype="<f4")
        assert unpacked.tolist() == np.array(plain["embedding"], dtype=np.float32).tolist()


async def test_usage_is_the_same_for_cache_hits(tiny_store: Path) -> None:
    body = {"input": "good film", "model": EMBEDDER}
    async with InProcess(tiny_store).client() as http:
        first, second = [await http.post(PATH, json=body) for _ in range(2)]
    assert second.headers["x-compute-type"] == "cache"
    assert second.json() == first.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embeddings", {"input": "good film", "model": EMBEDDER}),
        (f"/models/{EMBEDDER}/v1/embeddings", {"input": "good film"}),
        (f"/models/{EMBEDDER}/v1/embeddings", {"input": "good film", "model": "any"}),
        ("/models/tiny%2Fembedder/v1/embeddings", {"input": "good film"}),
        (PATH, {"input": "good film"}),  # default: the first embedding model
        (PATH, {"input": "good film", "model": ""}),
        (PATH, {"input": "good film", "model": "text-embeddings-inference"}),
        (PATH, {"input": "good film", "model": EMBEDDER, "user": "u1"}),
        (PATH, {"input": ["good film"], "model": EMBEDDER, "encoding_format": None}),
    ],
)
async def test_all_input_forms_return_the_same_embedding(
    path: str, body: dict[str, Any], tiny_store: Path
) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(path, json=body)
        plain = await http.post(PATH, json={"input": "good film", "model": EMBEDDER})
    assert response.status_code == 200
    assert response.json() == plain.json()


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        ({"output_dimension": 3, "output_dtype": "float"}, {"dimensions": 3}),
        ({"truncate": "END"}, {"truncate": True, "truncation_direction": "right"}),
        ({"truncate": "START"}, {"truncate": True, "truncation_direction": "left"}),
    ],
)
async def test_names_of_other_servers_mean_the_same(
    sent: dict[str, Any], same: dict[str, Any], tiny_store: Path
) -> None:
    body = {"input": "night " + TOO_LONG, "model": EMBEDDER}
    async with InProcess(tiny_store).client() as http:
        first, second, plain = [
            (await http.post(PATH, json=body | fields)).json()["data"]
            for fields in (sent, same, {})
        ]
    assert first == second
    assert (first == plain) == (sent == {"truncate": "END"})


async def test_dimensions_truncates_and_normalizes(tiny_store: Path) -> None:
    body = {"input": "good film", "model": EMBEDDER}
    async with InProcess(tiny_store).client() as http:
        full, cut = [
            np.array((await http.post(PATH, json=b)).json()["data"][0]["embedding"])
            for b in (body, body | {"dimensions": 3})
        ]
    np.testing.assert_allclose(cut, full[:3] / np.linalg.norm(full[:3]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": EMBEDDER}, 400, "invalid_field", "input"),
        ({"input": None, "model": EMBEDDER}, 400, "invalid_field", "input"),
        ({"input": "", "model": EMBEDDER}, 400, "empty_input", "input"),
        ({"input": [], "model": EMBEDDER}, 400, "empty_input", "input"),
        ({"input": ["a", ""], "model": EMBEDDER}, 400, "empty_input", "input[1]"),
        ({"input": {"a": 1}, "model": EMBEDDER}, 400, "invalid_field", "input"),
        ({"input": ["a", 7], "model": EMBEDDER}, 400, "invalid_field", "input[1]"),
        ({"input": "a", "model": 7}, 400, "invalid_field", "model"),
        ({"input": "a", "model": "no/such"}, 404, "model_not_found", "model"),
        ({"input": "a", "model": CLASSIFIER}, 400, "wrong_task", "model"),
        ({"input": "a", "model": EMBEDDER, "dimensions": 0}, 400, "invalid_field", "dimensions"),
        ({"input": "a", "model": EMBEDDER, "dimensions": 99}, 400, "invalid_field", "dimensions"),
        (
            {"input": "a", "model": EMBEDDER, "encoding_format": "int8"},
            400,
            "invalid_field",
            "encoding_format",
        ),
        ({"input": TOO_LONG, **WHOLE}, 400, "input_too_long", "input"),
        ({"input": ["a", TOO_LONG], **WHOLE}, 400, "input_too_long", "input[1]"),
        *(
            ({"input": TOO_LONG, "model": EMBEDDER, **sent}, 400, "input_too_long", "input")
            for sent in ({"truncate": "NONE"}, {"truncation": False})
        ),
        *(
            ({"input": "a", "model": EMBEDDER, name: value}, 400, "invalid_field", name)
            for name, value in {
                "output_dtype": "int8",
                "embedding_type": "binary",
                "late_chunking": True,
                "truncate_prompt_tokens": 4,
                "add_special_tokens": False,
            }.items()
        ),
        ({"input": ["a"] * 5, "model": EMBEDDER}, 400, "too_many_items", "input"),
    ],
)
async def test_errors_have_the_openai_format(
    body: dict[str, Any], status: int, code: str, param: str, tiny_store: Path
) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=4))
    async with InProcess(tiny_store, settings=settings).client() as http:
        response = await http.post(PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "`inputs" not in error["message"], "the client sent `input`"
    assert "`parameters." not in error["message"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "malformed_body"),
        (b"[]", 400, "malformed_body"),
        (b" " * 99, 413, "body_too_large"),
    ],
)
async def test_unreadable_body_has_the_openai_error_format(
    content: bytes, status: int, code: str, tiny_store: Path
) -> None:
    settings = IngressUserConfig(limits=LimitSettings(body_bytes=50))
    async with InProcess(tiny_store, settings=settings).client() as http:
        response = await http.post(PATH, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["param"] == "body"


async def test_concurrent_equal_requests_have_errors_of_their_apis(tiny_store: Path) -> None:
    # Both requests share one computation and therefore one exception object.
    async with InProcess(tiny_store).client() as http:
        openai, hugging_face = await asyncio.gather(
            http.post(PATH, json={"input": TOO_LONG, **WHOLE}),
            http.post(f"/models/{EMBEDDER}", json={"inputs": TOO_LONG, "truncate": False}),
        )
    assert openai.json()["error"]["param"] == "input"
    assert hugging_face.json()["field"] == "inputs"
    assert "`inputs`" in hugging_face.json()["error"]


async def test_long_texts_are_truncated_by_default(tiny_store: Path) -> None:
    body = {"input": TOO_LONG, "model": EMBEDDER}
    async with InProcess(tiny_store).client() as http:
        response = await http.post(PATH, json=body)
    assert response.json()["usage"]["prompt_tokens"] == 16
    assert "x-hf-warning" in response.headers


async def test_all_forms_of_a_model_path_describe_the_model(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        matches = [await http.get(f"/v1/models/{i}") for i in (EMBEDDER, "tiny%2Fembedder")]
        alone = await http.get(f"/models/{EMBEDDER}/v1/models")
        unknown = await http.get("/v1/models/no/such")
        listed = await http.get("/v1/models")
    assert [response.json()["id"] for response in matches] == [EMBEDDER, EMBEDDER]
    assert listed.json()["data"][0] == matches[0].json()
    assert alone.json() == {"object": "list", "data": [matches[0].json()], "has_more": False}
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert unknown.json()["error"]["param"] == "model"


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_generation_by_an_encoder_is_rejected_with_its_tasks(
    route: str, tiny_store: Path
) -> None:
    body = {"model": "dummy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with InProcess(tiny_store).client() as http:
        anyone = await http.post(f"/v1/{route}", json=body)
        named = await http.post(f"/v1/{route}", json=body | {"model": EMBEDDER})
        in_path = await http.post(f"/models/{EMBEDDER}/v1/{route}", json=body)
        unknown = await http.post(f"/v1/{route}", json=body | {"model": "no/such"})
    for response in (anyone, named, in_path):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "wrong_task")
        assert error["type"] == "invalid_request_error"
    assert "`feature-extraction`" in named.json()["error"]["message"]
    assert in_path.json() == named.json()
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
