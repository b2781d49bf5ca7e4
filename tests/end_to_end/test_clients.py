"""Clients we did not write, unmodified."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from openai import BadRequestError, NotFoundError, OpenAI

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.conftest import CLASSIFIER, DAMAGED, EMBEDDER

# Replies of one model may differ by the company a text is computed in (dynamic int8 ranges).
SAME_COSINE = 0.98


@pytest.fixture
def openai(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


def hub_client(cluster: Cluster, model: str) -> InferenceClient:
    return InferenceClient(model=f"{cluster.url}/models/{model}")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_hub_client_gets_embeddings(cluster: Cluster) -> None:
    rows = hub_client(cluster, EMBEDDER).feature_extraction(["a dog", "a puppy", "a tax form"])
    assert rows.shape == (3, 384)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-4)
    assert cosine(rows[0], rows[1]) > cosine(rows[0], rows[2]) + 0.2


def test_the_hub_client_compares_sentences_on_the_models_own_path(cluster: Cluster) -> None:
    near, far = hub_client(cluster, EMBEDDER).sentence_similarity(
        "A man is playing a guitar.", ["Someone plays guitar.", "The market fell on Monday."]
    )
    assert near > 0.7 > 0.3 > far


def test_the_hub_client_classifies(cluster: Cluster) -> None:
    best, other = hub_client(cluster, CLASSIFIER).text_classification("a gorgeous, witty film")
    assert (best.label, other.label) == ("POSITIVE", "NEGATIVE")
    assert best.score > 0.9
    assert best.score + other.score == pytest.approx(1)


def test_the_openai_client_gets_the_same_embedding(cluster: Cluster, openai: OpenAI) -> None:
    text = "The same sentence through two doors."
    mine = openai.embeddings.create(model=EMBEDDER, input=text)
    hubs = hub_client(cluster, EMBEDDER).feature_extraction(text)[0]
    assert mine.usage.prompt_tokens == 9
    assert cosine(np.array(mine.data[0].embedding), hubs) > SAME_COSINE


def test_the_openai_client_may_ask_for_fewer_dimensions(openai: OpenAI) -> None:
    reply = openai.embeddings.create(model=EMBEDDER, input=["a", "b"], dimensions=64)
    assert [len(item.embedding) for item in reply.data] == [64, 64]


def test_the_openai_client_lists_and_retrieves_models(openai: OpenAI) -> None:
    listed = {model.id: model for model in openai.models.list()}
    assert {EMBEDDER, CLASSIFIER, DAMAGED} == set(listed)
    assert openai.models.retrieve(EMBEDDER).owned_by == "sentence-transformers"


def test_the_openai_client_understands_our_errors(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody/nothing does not exist"):
        openai.embeddings.create(model="nobody/nothing", input="a")
    with pytest.raises(BadRequestError, match="`input` is an empty list") as refused:
        openai.embeddings.create(model=EMBEDDER, input=[])
    assert refused.value.param == "input"


def test_a_damaged_model_is_refused_and_the_others_serve(cluster: Cluster) -> None:
    refused = httpx.post(f"{cluster.url}/models/{DAMAGED}", json={"inputs": "a"})
    assert refused.status_code == 503
    assert "tokenizer.json" in refused.json()["error"]
    listed = {m["id"]: m["state"] for m in httpx.get(f"{cluster.url}/models").json()["data"]}
    assert listed == {EMBEDDER: "ready", CLASSIFIER: "ready", DAMAGED: "refused"}
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
