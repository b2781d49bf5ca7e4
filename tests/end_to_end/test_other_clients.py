"""Clients from a second environment: an old hub client, Cohere's, Infinity's and LangChain's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.client_environment import run_client, run_old_hub
from tests.support.ray_cluster import Cluster
from tests.support.served_models import (
    CLASSIFIER,
    DAMAGED,
    EMBEDDER,
    MASK_FILLER,
    NER_MODEL,
    NLI_MODEL,
    QA_MODEL,
    RANKER,
    SOUND,
)
from tests.support.vectors import cosine

FILM = "a gorgeous, witty film"
QUERY = "Which animal purrs?"
ANIMALS = ["A tax form is due in May.", "A cat purrs.", "A dog barks."]
LABELS = ["film", "food", "city"]


def infinity(cluster: Cluster, call: str, **body: Any) -> Any:
    return run_client("infinity.py", cluster.url, call, json.dumps(body))


def cohere(cluster: Cluster, method: str, client: str = "ClientV2", **arguments: Any) -> Any:
    return run_client("cohere_client.py", cluster.url, client, method, json.dumps(arguments))


def test_old_hub_client_embeds_and_compares(cluster: Cluster) -> None:
    (row,) = run_old_hub(cluster.url, "feature_extraction", text=FILM, model=EMBEDDER)
    assert len(row) == 384
    near, far = run_old_hub(
        cluster.url,
        "sentence_similarity",
        sentence="A man is playing a guitar.",
        other_sentences=["Someone plays guitar.", "The market fell on Monday."],
        model=EMBEDDER,
    )
    assert near > 0.7 > 0.3 > far


def test_old_hub_client_classifies_texts_and_tokens(cluster: Cluster) -> None:
    best, _ = run_old_hub(cluster.url, "text_classification", text=FILM, model=CLASSIFIER)
    assert best["label"] == "POSITIVE"
    text = "We went to the river"  # the tagger's random weights give it a label other than O
    tagged = run_old_hub(cluster.url, "token_classification", text=text, model=NER_MODEL)
    assert tagged
    assert [text[group["start"] : group["end"]] for group in tagged] == [
        group["word"] for group in tagged
    ]


def test_old_hub_client_fills_masks_and_answers_questions(cluster: Cluster) -> None:
    filled = run_old_hub(cluster.url, "fill_mask", text="the [MASK] film", model=MASK_FILLER)
    assert len(filled) == 5
    answer = run_old_hub(
        cluster.url,
        "question_answering",
        question="When was the lighthouse on Gull Point built?",
        context="The lighthouse on Gull Point was built in 1871 from grey granite.",
        model=QA_MODEL,
    )
    assert answer["answer"] == "1871"


def test_old_hub_client_gets_zero_shot_in_the_legacy_format(cluster: Cluster) -> None:
    scored = run_old_hub(
        cluster.url,
        "zero_shot_classification",
        text=FILM,
        labels=LABELS,
        multi_label=True,
        model=NLI_MODEL,
    )
    assert {one["label"] for one in scored} == {*LABELS}
    again = run_old_hub(
        cluster.url, "zero_shot_classification", text=FILM, labels=LABELS, multi_label=True,
        model=f"{cluster.url}/models/{NLI_MODEL}",
    )  # fmt: skip
    assert again == scored


def test_old_hub_client_lists_loaded_models(cluster: Cluster) -> None:
    status = run_old_hub(cluster.url, "get_model_status", model=EMBEDDER)
    assert (status["loaded"], status["state"]) == (True, "Loaded")
    assert status["framework"] == "transformers"
    assert run_old_hub(cluster.url, "get_endpoint_info", model=CLASSIFIER)["labels"]
    assert run_old_hub(cluster.url, "health_check", model=f"{cluster.url}/models/{EMBEDDER}")


def test_old_hub_client_raises_errors(cluster: Cluster) -> None:
    missing = run_old_hub(cluster.url, "text_classification", text=FILM, model="nobody/nothing")
    assert "nobody/nothing does not exist" in missing["message"]
    refused = run_old_hub(cluster.url, "fill_mask", text="no gap", model=MASK_FILLER)
    assert refused["raised"] == "BadRequestError"
    assert "mask" in refused["message"]


def test_infinity_client_embeds(cluster: Cluster) -> None:
    response = infinity(cluster, "embeddings", input=[FILM, FILM, "a tax form"])
    first, again, other = (entry["embedding"] for entry in response["data"])
    assert len(first) == 384
    assert cosine(first, again) > 0.98 > cosine(first, other)
    assert response["model"] == EMBEDDER
    assert response["usage"]["prompt_tokens"] > 0
    short = infinity(cluster, "embeddings", input=FILM, model=EMBEDDER, dimensions=64)
    assert len(short["data"][0]["embedding"]) == 64


def test_infinity_client_ranks(cluster: Cluster) -> None:
    response = infinity(
        cluster, "rerank", query=QUERY, documents=ANIMALS, model=EMBEDDER, return_documents=True
    )
    assert response["results"][0]["index"] == 1
    assert response["results"][0]["document"] == ANIMALS[1]
    assert (response["model"], response["object"]) == (EMBEDDER, "rerank")
    best = infinity(cluster, "rerank", query=QUERY, documents=ANIMALS, top_n=1)
    assert (best["model"], len(best["results"])) == (RANKER, 1)


def test_infinity_client_classifies(cluster: Cluster) -> None:
    response = infinity(cluster, "classify", input=[FILM, "a dull one"], model=CLASSIFIER)
    assert [row[0]["label"] for row in response["data"]] == ["POSITIVE", "NEGATIVE"]


def test_infinity_client_reads_health_and_models(cluster: Cluster) -> None:
    assert infinity(cluster, "health")["status"] == "ok"
    listed = infinity(cluster, "models")["data"]
    assert {model["id"] for model in listed} == {*SOUND, DAMAGED}


def test_infinity_client_raises_errors(cluster: Cluster) -> None:
    refused = infinity(cluster, "embeddings", input=FILM, model="nobody/nothing")
    assert refused["raised"] == "UnexpectedStatus"
    assert "nobody/nothing does not exist" in refused["message"]


@pytest.mark.parametrize("model", [EMBEDDER, RANKER])
def test_cohere_client_ranks(cluster: Cluster, model: str) -> None:
    response = cohere(cluster, "rerank", model=model, query=QUERY, documents=ANIMALS, top_n=2)
    scores = [result["relevance_score"] for result in response["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    if model == EMBEDDER:
        assert response["results"][0]["index"] == 1


def test_cohere_client_raises_errors(cluster: Cluster) -> None:
    missing = cohere(cluster, "rerank", model="nobody/nothing", query=QUERY, documents=ANIMALS)
    assert (missing["raised"], missing["status"]) == ("NotFoundError", 404)
    assert "nobody/nothing does not exist" in missing["message"]
    wrong = cohere(cluster, "rerank", model=EMBEDDER, query=QUERY, documents=[])
    assert (wrong["raised"], wrong["status"]) == ("BadRequestError", 400)
    assert "documents" in wrong["message"]


@pytest.mark.parametrize("client", ["Client", "ClientV2"])
def test_cohere_client_embeds(cluster: Cluster, client: str) -> None:
    """The client sends at most 96 texts per request, and merges the answers."""
    texts = [f"{text} {i}" for i in range(50) for text in ANIMALS]
    types = ["float", "ubinary"]
    body = {"model": EMBEDDER, "texts": texts, "input_type": "search_document"}
    vectors = cohere(cluster, "embed", client, embedding_types=types, **body)["embeddings"]
    signs = np.unpackbits(np.array(vectors["ubinary"], np.uint8), axis=1)
    floats = np.array(vectors["float"], np.float32)
    assert floats.shape == (150, 384)
    assert (signs == (floats > 0)).all()
    if client == "Client":
        plain = cohere(cluster, "embed", client, **body)
        assert plain["response_type"] == "embeddings_floats"
        assert np.allclose(plain["embeddings"], floats, atol=1e-4)


def test_langchain_embeds_documents_and_queries(cluster: Cluster) -> None:
    """LangChain's length check is off, because it counts tokens of OpenAI's models."""
    settings = {"model": EMBEDDER, "check_embedding_ctx_length": False}
    response = run_client(
        "langchain_embeddings.py", f"{cluster.url}/v1", json.dumps(settings), json.dumps(ANIMALS)
    )
    assert [len(vector) for vector in response["documents"]] == [384] * 3
    assert cosine(response["documents"][0], response["query"]) > 0.98
