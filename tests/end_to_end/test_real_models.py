"""Trained demo models that `make serve` does not build, for further tasks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.end_to_end.reference_answers import (
    CLAIMS,
    DESCRIPTIONS,
    LETTERS,
    PASSAGES,
    QUERIES,
    RECORD,
)
from tests.support.ray_cluster import Cluster
from tests.support.served_models import MINILM_NLI, MINILM_RERANK, NUMBER_WORDS, RAMPART

DATE, DATE_WORDS = "21 june 1984 14:30", "june twenty-first, nineteen eighty-four, fourteen thirty"


# Maximum difference of a score from transformers in float32. The graphs are int8.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The answers of transformers, written by `reference_answers.py`."""
    answers: dict[str, Any] = json.loads(RECORD.read_bytes())
    return answers


def test_entities_equal_those_of_transformers(cluster: Cluster, record: dict[str, Any]) -> None:
    client = InferenceClient(f"{cluster.url}/models/{RAMPART}")
    for letter, entities in zip(LETTERS, record["entities"], strict=True):
        found = client.token_classification(letter, aggregation_strategy="simple")
        kept = ("entity_group", "word", "start", "end")
        assert [[one[key] for key in kept] for one in found] == [
            [one[key] for key in kept] for one in entities
        ]
        scores = [one["score"] for one in entities]
        assert [one.score for one in found] == pytest.approx(scores, abs=TOLERANCE)


def test_scores_of_claims_equal_those_of_transformers(
    cluster: Cluster, record: dict[str, Any]
) -> None:
    client = InferenceClient(f"{cluster.url}/models/{MINILM_NLI}")
    for description, scores in zip(DESCRIPTIONS, record["claims"], strict=True):
        ranked = client.zero_shot_classification(
            description, list(CLAIMS), multi_label=True, hypothesis_template="{}"
        )
        found = {one.label: one.score for one in ranked}
        assert found == pytest.approx(scores, abs=TOLERANCE)
        assert ranked[0].label == max(scores, key=scores.get)


def test_scores_of_passages_equal_those_of_transformers(
    cluster: Cluster, record: dict[str, Any]
) -> None:
    url = f"{cluster.url}/models/{MINILM_RERANK}/rerank"
    for query, scores in zip(QUERIES, record["scores"], strict=True):
        response = httpx.post(url, json={"query": query, "texts": PASSAGES}, timeout=60)
        found = {one["index"]: one["score"] for one in response.json()}
        assert found == pytest.approx(dict(enumerate(scores)), abs=TOLERANCE)
        assert response.json()[0]["index"] == scores.index(max(scores))


@pytest.mark.parametrize("beams", [1, 4])
def test_date_is_written_in_words(beams: int, cluster: Cluster) -> None:
    body = {"inputs": DATE, "parameters": {"num_beams": beams}}
    response = httpx.post(f"{cluster.url}/models/{NUMBER_WORDS}", json=body, timeout=60)
    assert response.json() == [{"generated_text": DATE_WORDS}]


def test_words_of_a_date_are_streamed(cluster: Cluster) -> None:
    body = {"inputs": DATE, "parameters": {"max_new_tokens": 40}}
    path = f"{cluster.url}/models/{NUMBER_WORDS}/generate_stream"
    with httpx.stream("POST", path, json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    assert len(events) > 5
    assert events[-1]["generated_text"] == DATE_WORDS
