from __future__ import annotations

import numpy as np
import orjson
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.rivals.apis import (
    NEW_TOKENS,
    EmbeddingApi,
    completion_api,
    hugging_face_api,
    inputs_api,
    open_inference_api,
    openai_api,
)

VECTORS = [[1.0, 2.0], [3.0, 4.0]]
EMBEDDING_APIS = {
    "hugging_face": (hugging_face_api("a/b"), VECTORS),
    "inputs": (inputs_api(), VECTORS),
    "openai": (openai_api("/embeddings", "m"), {"data": [{"embedding": v} for v in VECTORS]}),
    "open_inference": (
        open_inference_api("m"),
        {"outputs": [{"name": "e", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]}]},
    ),
}


@pytest.mark.parametrize("name", EMBEDDING_APIS)
def test_parse_embeddings_returns_a_row_per_text(name: str) -> None:
    api, answer = EMBEDDING_APIS[name]
    np.testing.assert_array_equal(api.parse(orjson.dumps(answer)), VECTORS)


@pytest.mark.parametrize("name", EMBEDDING_APIS)
@pytest.mark.parametrize("body", [b"Internal Server Error", b"{}", b'{"detail": "x"}', b"[1, 2]"])
def test_parse_embeddings_rejects_other_answers(name: str, body: bytes) -> None:
    with pytest.raises(BenchmarkError, match="the answer is: "):
        EMBEDDING_APIS[name][0].parse(body)


@pytest.mark.parametrize("name", EMBEDDING_APIS)
def test_build_embeddings_contains_all_texts(name: str) -> None:
    api: EmbeddingApi = EMBEDDING_APIS[name][0]
    assert api.path.startswith("/")
    body = api.build(("one text", "another"))
    assert b"one text" in body
    assert b"another" in body


def test_build_one_text_is_no_list() -> None:
    assert orjson.loads(inputs_api().build(("x",))) == {"inputs": "x"}


def test_hugging_face_requests_bypass_the_cache() -> None:
    assert orjson.loads(hugging_face_api("a/b").build(("x",)))["options"] == {"use_cache": False}


def test_completion_api_is_greedy_and_counts_tokens() -> None:
    api = completion_api("m")
    request = orjson.loads(api.build(("The sea",)))
    assert (request["temperature"], request["max_tokens"]) == (0, NEW_TOKENS)
    answer = {"choices": [{"text": " is"}], "usage": {"completion_tokens": 1}}
    assert api.parse(orjson.dumps(answer)) == (" is", 1)
    with pytest.raises(BenchmarkError, match="an object with `choices`"):
        api.parse(b"{}")
