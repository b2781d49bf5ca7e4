"""curl requests, often without a content type or with that of a form."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.ray_cluster import Cluster
from tests.support.served_models import CLASSIFIER, EMBEDDER, NLI_MODEL, QA_MODEL, RANKER

FILM = "a gorgeous, witty film"
NO_TYPE = ("-H", "Content-Type:")
FORM_TYPE = ()  # `-d` alone sends the content type of a form


def curl(cluster: Cluster, path: str, body: Any = None, *options: str) -> tuple[int, Any]:
    """Run curl and return the status and the parsed JSON. With a body, curl sends a POST."""
    data = () if body is None else ("-d", body if isinstance(body, str) else json.dumps(body))
    done = subprocess.run(
        ["curl", "-sS", "-w", "\n%{http_code}", *options, *data, cluster.url + path],
        capture_output=True,
        text=True,
        check=True,
    )
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), json.loads(answer)


@pytest.mark.parametrize("options", [NO_TYPE, FORM_TYPE, ("-H", "Content-Type: text/plain")])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/models/{CLASSIFIER}", {"inputs": FILM}),
        (f"/pipeline/text-classification/{CLASSIFIER}", {"inputs": FILM}),
        ("/predict", {"inputs": FILM}),
        ("/classify", {"input": [FILM]}),
    ],
)
def test_body_is_json_with_any_content_type(
    cluster: Cluster, path: str, body: Any, options: tuple[str, ...]
) -> None:
    status, answer = curl(cluster, path, body, *options)
    assert status == 200
    assert '"label": "POSITIVE"' in json.dumps(answer)


def test_bare_string_or_list_is_accepted_as_inputs(cluster: Cluster) -> None:
    path = f"/models/{CLASSIFIER}"
    status, ((best, _),) = curl(cluster, path, json.dumps(FILM))
    assert (status, best["label"]) == (200, "POSITIVE")
    assert len(curl(cluster, path, [FILM, "a dull one"])[1]) == 2


def test_options_are_read_from_body_and_headers(cluster: Cluster) -> None:
    body = {"inputs": FILM, "options": {"use_cache": False, "wait_for_model": True}}
    assert curl(cluster, f"/models/{CLASSIFIER}", body)[0] == 200
    headers = ("-H", "x-use-cache: false", "-H", "X-Wait-For-Model: 1")
    assert curl(cluster, f"/models/{CLASSIFIER}", {"inputs": FILM}, *headers)[0] == 200


def test_zero_shot_is_a_list_without_legacy_format(cluster: Cluster) -> None:
    body = {"inputs": FILM, "parameters": {"candidate_labels": "film, food"}}
    _, scored = curl(cluster, f"/models/{NLI_MODEL}", body)
    assert {one["label"] for one in scored} == {"film", "food"}
    old = {**body, "options": {"legacy_format": True}}
    _, classic = curl(cluster, f"/models/{NLI_MODEL}", old)
    assert classic["labels"] == [one["label"] for one in scored]
    assert classic["sequence"] == FILM


def test_ranking_accepts_every_request_format(cluster: Cluster) -> None:
    search = {"query": "Which animal purrs?", "texts": ["A dog barks.", "A cat purrs."]}
    asked = [
        (f"/models/{RANKER}", {"inputs": search}),
        (f"/models/{RANKER}", search),
        (f"/models/{RANKER}/pipeline/text-ranking", {"inputs": search}),
        (f"/models/{RANKER}/rerank", search),
        ("/rerank", search),
    ]
    answers = [curl(cluster, path, body)[1] for path, body in asked]
    assert {one["index"] for one in answers[0]} == {0, 1}
    assert answers == [answers[0]] * len(asked)


def test_rerank_is_served_on_every_route(cluster: Cluster) -> None:
    body = {
        "model": EMBEDDER,
        "query": "Which animal purrs?",
        "documents": ["A dog barks.", {"text": "A cat purrs."}],
        "top_n": 1,
    }
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, answer = curl(cluster, path, body)
        assert status == 200
        assert [one["index"] for one in answer["results"]] == [1]


def test_predict_accepts_a_pair(cluster: Cluster) -> None:
    status, flat = curl(cluster, f"/models/{RANKER}/predict", {"inputs": ["a query", "a text"]})
    assert (status, len(flat)) == (200, 1)
    _, nested = curl(cluster, "/predict", {"inputs": [[FILM], ["a dull one"]]})
    assert [row[0]["label"] for row in nested] == ["POSITIVE", "NEGATIVE"]


def test_tokenize_and_decode_round_trip(cluster: Cluster) -> None:
    _, (tokens,) = curl(cluster, "/tokenize", {"inputs": "A kitten, Łódź"})
    words = [token for token in tokens if not token["special"]]
    assert all(t["text"] == "A kitten, Łódź"[t["start"] : t["stop"]] for t in words)
    ids = [token["id"] for token in tokens]
    assert curl(cluster, "/decode", {"ids": ids}) == (200, ["a kitten, łodz"])


def test_chat_is_tokenized_by_the_generator(cluster: Cluster) -> None:
    chat = {"messages": [{"role": "user", "content": FILM}]}
    _, tokenized = curl(cluster, "/tokenize", chat)
    status, answer = curl(cluster, "/detokenize", {"tokens": tokenized["tokens"]})
    assert status == 200
    assert FILM in answer["prompt"]
    _, counted = curl(cluster, "/v1/messages/count_tokens", chat)
    assert counted == {"input_tokens": tokenized["count"]}


def test_unsupported_route_is_rejected_with_a_reason(cluster: Cluster) -> None:
    status, answer = curl(cluster, "/embed_sparse", {"inputs": FILM})
    assert (status, answer["error_type"]) == (424, "Backend")
    assert "`sparse-embeddings`" in answer["error"]


def test_embed_all_returns_a_vector_per_token(cluster: Cluster) -> None:
    status, (vectors,) = curl(cluster, "/embed_all", {"inputs": FILM})
    _, (tokens,) = curl(cluster, "/tokenize", {"inputs": FILM})
    assert (status, len(vectors)) == (200, len(tokens))
    _, (pooled,) = curl(cluster, "/embed", {"inputs": FILM, "normalize": False})
    means = [sum(column) / len(column) for column in zip(*vectors, strict=True)]
    assert means == pytest.approx(pooled, abs=1e-3)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ping", "/ready", "/info", "/models", f"/models/{EMBEDDER}/health"]
)
def test_health_routes_return_json(cluster: Cluster, path: str) -> None:
    status, answer = curl(cluster, path)
    assert status == 200
    assert isinstance(answer, dict)


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        (f"/models/{EMBEDDER}", "{not json", 400, "JSON"),
        (f"/models/{EMBEDDER}", {"input": "a"}, 400, "inputs"),
        (f"/models/{EMBEDDER}", {"inputs": "a", "parameters": {"top": 1}}, 422, "top"),
        (f"/models/{QA_MODEL}", {"inputs": {"question": "a"}}, 400, "inputs.context"),
        ("/nowhere", {"inputs": "a"}, 404, "/nowhere"),
        ("/health", {"inputs": "a"}, 405, "POST"),
        ("/embed", {"inputs": []}, 400, "empty"),
        ("/rerank", {"query": "a"}, 422, "texts"),
        ("/v1/embeddings", {"input": 5}, 400, "input"),
        ("/v1/completions", {"prompt": "a", "model": CLASSIFIER}, 400, "generates no text"),
        ("/v2/models/nobody/infer", {"inputs": []}, 404, "nobody"),
    ],
)
def test_invalid_request_has_an_error_message(
    cluster: Cluster, path: str, body: Any, status: int, sentence: str
) -> None:
    returned, answer = curl(cluster, path, body)
    assert returned == status
    assert sentence in json.dumps(answer)
