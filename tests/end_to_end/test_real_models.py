"""Trained demo models that `make serve` does not build, for further tasks."""

from __future__ import annotations

import json

import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.support.ray_cluster import Cluster
from tests.support.served_models import MINILM_NLI, MINILM_RERANK, NUMBER_WORDS, RAMPART

DATE, DATE_WORDS = "21 june 1984 14:30", "june twenty-first, nineteen eighty-four, fourteen thirty"


def test_entities_of_a_letter_are_found(cluster: Cluster) -> None:
    client = InferenceClient(f"{cluster.url}/models/{RAMPART}")
    letter = "My name is Maria Castillo and I moved to Denver, Colorado."
    found = client.token_classification(letter, aggregation_strategy="simple")
    kinds = {letter[entity.start : entity.end]: entity.entity_group for entity in found}
    assert kinds["Maria"] == "GIVEN_NAME"
    assert kinds["Castillo"] == "SURNAME"
    assert kinds["Denver"] == "CITY"
    assert kinds["Colorado"] == "STATE"


def test_claim_that_follows_from_a_description_is_chosen(cluster: Cluster) -> None:
    client = InferenceClient(f"{cluster.url}/models/{MINILM_NLI}")
    description = "Two boys in red shirts are kicking a ball on a wet field."
    claims = ["Nobody is outside.", "Children are playing a sport.", "The boys are asleep in bed."]
    ranked = client.zero_shot_classification(description, claims, hypothesis_template="{}")
    assert ranked[0].label == "Children are playing a sport."
    assert ranked[0].score > 0.5


def test_passage_that_answers_is_ranked_first(cluster: Cluster) -> None:
    texts = [
        "The harbour is full of fishing boats.",
        "Martha Kell was the first keeper of the lighthouse and lived there for nineteen years.",
        "The lighthouse was built of grey granite.",
    ]
    body = {"query": "Who was the first keeper of the lighthouse?", "texts": texts}
    response = httpx.post(f"{cluster.url}/models/{MINILM_RERANK}/rerank", json=body, timeout=60)
    assert response.json()[0]["index"] == 1


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
