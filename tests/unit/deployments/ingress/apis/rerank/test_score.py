"""Scores of pairs of texts in vLLM's format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig, LimitSettings
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.in_process import InProcess

RANKER = "tiny/ranker"
QUERY = "good film"
TEXTS = ["night", "lovely food", "the river"]
LIMITS = IngressUserConfig(limits=LimitSettings(items=3))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store with an embedder and a cross-encoder."""
    made = tmp_path_factory.mktemp("scorers")
    seal_tiny(made, EMBEDDER)
    seal_tiny(made, RANKER, labels=("SCORE",), tasks=(TaskName.TEXT_RANKING,))
    return made


@pytest.fixture
async def http(store: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with InProcess(store, (EMBEDDER, RANKER), settings=LIMITS).client() as client:
        yield client


async def score(http: httpx.AsyncClient, path: str = "/score", **body: Any) -> list[float]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    for number, pair in enumerate(answer["data"]):
        assert (pair["index"], pair["object"]) == (number, "score")
    return [pair["score"] for pair in answer["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score", f"/models/{RANKER}/v1/score"])
async def test_scores_have_the_order_of_the_texts(path: str, http: httpx.AsyncClient) -> None:
    scores = await score(http, path, text_1=QUERY, text_2=TEXTS)
    ranked = (await http.post("/rerank", json={"query": QUERY, "texts": TEXTS})).json()
    assert scores == [
        pytest.approx(one["score"]) for one in sorted(ranked, key=lambda one: one["index"])
    ]


async def test_as_many_queries_as_texts_are_scored_in_pairs(http: httpx.AsyncClient) -> None:
    queries = [QUERY, "train", "city"]
    alone = [
        (await score(http, text_1=query, text_2=text))[0]
        for query, text in zip(queries, TEXTS, strict=True)
    ]
    assert len(set(alone)) == 3
    assert await score(http, text_1=queries, text_2=TEXTS) == pytest.approx(alone, abs=1e-5)


async def test_scores_of_an_embedding_model_are_similarities(http: httpx.AsyncClient) -> None:
    same, other = await score(http, model=EMBEDDER, text_1=QUERY, text_2=[QUERY, "night"])
    assert same == pytest.approx(1, abs=1e-5)
    assert other < same


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"text_1": QUERY}, 400, "text_2"),
        ({"text_1": [], "text_2": TEXTS}, 400, "text_1"),
        ({"text_1": ["a", "b"], "text_2": TEXTS}, 400, "`text_1` has 2 texts and `text_2` 3"),
        ({"text_1": TEXTS, "text_2": "a"}, 400, "`text_1` has 3 texts and `text_2` 1"),
        ({"text_1": ["a"] * 4, "text_2": ["b"] * 4}, 422, "`text_1` has 4 items"),
        ({"text_1": "a", "text_2": ["b"] * 4}, 422, "`text_2` has 4 items"),
        ({"text_1": "a", "text_2": "b", "instruction": "c"}, 400, "`instruction`"),
        ({"text_1": "a", "text_2": "b", "model": "no/such"}, 404, "no/such"),
    ],
)
async def test_error_names_the_field_of_the_body(
    body: dict[str, Any], status: int, reason: str, http: httpx.AsyncClient
) -> None:
    response = await http.post("/score", json=body)
    assert response.status_code == status, response.text
    assert reason in response.text
