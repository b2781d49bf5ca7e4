"""Response cache and tokenization cache: their effect on responses, headers and metrics."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.support.ray_cluster import Cluster
from tests.support.served_models import CLASSIFIER, EMBEDDER
from tests.support.waiting import wait_for


@pytest.fixture
def text() -> str:
    """Return a text without a cached response."""
    return f"unheard of: {uuid.uuid4()}"


def asked(cluster: Cluster, path: str, body: Any) -> httpx.Response:
    reply = httpx.post(cluster.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        (f"/models/{EMBEDDER}", "inputs"),
        (f"/models/{CLASSIFIER}", "inputs"),
        ("/embed", "inputs"),
        (f"/models/{EMBEDDER}/v1/embeddings", "input"),
    ],
)
def test_second_equal_request_is_a_cache_hit(
    cluster: Cluster, text: str, path: str, inputs: str
) -> None:
    first, second = (asked(cluster, path, {inputs: text}) for _ in range(2))
    assert (first.headers["x-cache"], second.headers["x-cache"]) == ("miss", "hit")
    assert first.headers["x-compute-type"] == "cpu-int8"
    assert second.headers["x-compute-type"] == "cache"
    assert second.json() == first.json()


def test_other_parameters_or_task_are_a_cache_miss(cluster: Cluster, text: str) -> None:
    path = f"/models/{EMBEDDER}"
    bodies = [
        {"inputs": text},
        {"inputs": text, "parameters": {"dimensions": 64}},
        {"inputs": [text]},
        {"inputs": {"source_sentence": text, "sentences": [text]}},
    ]
    responses = [asked(cluster, path, body) for body in bodies]
    assert [each.headers["x-cache"] for each in responses] == ["miss"] * 4
    assert len(responses[1].json()[0]) == 64
    assert responses[3].json() == pytest.approx([1], abs=1e-4)


def test_use_cache_false_computes_again(cluster: Cluster, text: str) -> None:
    body = {"inputs": text, "options": {"use_cache": False}}
    replies = [asked(cluster, f"/models/{EMBEDDER}", body) for _ in range(2)]
    assert {reply.headers["x-cache"] for reply in replies} == {"miss"}
    assert {reply.headers["x-compute-type"] for reply in replies} == {"cpu-int8"}


def lookups(cluster: Cluster, metric: str, result: str) -> float:
    """Return how many cache lookups for the embedder had `result`, according to `metric`."""
    total = 0.0
    for line in cluster.metrics().splitlines():
        name, _, value = line.rpartition(" ")
        if (
            name.startswith(f"hundredfold_{metric}_total{{")
            and f'model="{EMBEDDER}"' in name
            and f'result="{result}"' in name
        ):
            total += float(value)
    return total


@pytest.mark.parametrize("metric", ["response_cache_lookups", "tokenization_cache_lookups"])
def test_metrics_count_hits_and_misses_of_both_caches(cluster: Cluster, metric: str) -> None:
    def both() -> bool:
        return all(lookups(cluster, metric, result) > 0 for result in ("hit", "miss"))

    text = "a text for the caches"
    # The last two requests skip the response cache, so that they reach the tokenization cache.
    for use_cache in (True, True, False, False):
        body = {"inputs": text, "options": {"use_cache": use_cache}}
        asked(cluster, f"/models/{EMBEDDER}", body)
    wait_for(both, 40)
