"""Tests of the request pipeline of all APIs: limits, response cache and records."""

from __future__ import annotations

import asyncio
import logging
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.artifacts.types import Device, TaskName
from deployments.config import CacheSettings, IngressUserConfig, LimitSettings
from deployments.errors import EngineFailed, Overloaded, build_overloaded
from deployments.ingress.request_log import select_log_level
from deployments.ingress.response_cache import STRING_BYTES, response_bytes
from deployments.messages import BatchKey, CallBatch, CallResult, ModelRef
from deployments.tasks.sparse_embeddings import SparseEmbeddings
from deployments.tasks.token_classification import TokenClassification
from deployments.transports.base import Deliver
from tests.support.artifacts import CLASSIFIER, EMBEDDER, tiny_manifest
from tests.support.asgi_client import AsgiClient
from tests.support.fakes import TIMEOUT_S, FailingEncoder, HangingEncoder, batch_by, wait_until
from tests.support.in_process import InProcess
from tests.support.loop_clock import LoopClock

EMBED = f"/models/{EMBEDDER}"
HASTY = IngressUserConfig(timeout_s=0.1, cold_start_wait_s=0.05)


async def compute_types(http: httpx.AsyncClient, *bodies: dict[str, object]) -> list[str]:
    return [(await http.post(EMBED, json=body)).headers["x-compute-type"] for body in bodies]


async def test_repeated_request_is_answered_from_the_cache(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        first, second = [await http.post(EMBED, json={"inputs": "night"}) for _ in range(2)]
    assert first.headers["x-compute-type"] == "cpu-fp32"
    assert second.headers["x-compute-type"] == "cache"
    assert second.json() == first.json()
    assert second.headers["x-compute-tokens"] == first.headers["x-compute-tokens"]


async def test_cache_key_depends_on_all_parameters(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert await compute_types(
            http,
            {"inputs": "night"},
            {"inputs": "Night"},
            {"inputs": "night", "parameters": {"normalize": False}},
            {"inputs": "night", "parameters": {"truncate": False}},
            {"inputs": {"source_sentence": "night", "sentences": ["night"]}},
            {"inputs": "night", "options": {"wait_for_model": True}},
        ) == ["cpu-fp32"] * 5 + ["cache"]


def test_texts_in_parameters_count_as_cached_bytes() -> None:
    def kept_bytes(*ignored: str) -> int:
        task_input = TokenClassification().parse(
            "a", {"ignore_labels": list(ignored)}, tiny_manifest(labels=("O", "PER"))
        )
        key = BatchKey(ModelRef("m", "1"), TaskName.TOKEN_CLASSIFICATION, Device.CPU, long=False)
        return response_bytes((key, task_input), CallResult([], "cpu-fp32"))

    assert kept_bytes("O", "x" * 1_000) - kept_bytes("O") == STRING_BYTES + 4 * 1_000


def test_arrays_of_sparse_vectors_count_as_cached_bytes() -> None:
    key = BatchKey(ModelRef("m", "1"), TaskName.SPARSE_EMBEDDINGS, Device.CPU, long=False)
    task_input = SparseEmbeddings().parse("a", {}, tiny_manifest())

    def build_vectors(texts: int, weights: int) -> list[dict[str, NDArray[Any]]]:
        return [
            {"indices": np.zeros(weights, np.int32), "values": np.ones(weights, np.float32)}
            for _ in range(texts)
        ]

    def kept_bytes(vectors: list[dict[str, NDArray[Any]]]) -> int:
        return response_bytes((key, task_input, ""), CallResult(vectors, "cpu-fp32"))

    assert kept_bytes(build_vectors(2, 5)) - kept_bytes(build_vectors(2, 2)) == 2 * 3 * 8
    tracemalloc.start()
    vectors = build_vectors(1_000, 1)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes(vectors) == pytest.approx(allocated, rel=0.1)


async def test_use_cache_false_skips_the_cache(tiny_store: Path) -> None:
    fresh = {"inputs": "night", "options": {"use_cache": False}}
    async with InProcess(tiny_store).client() as http:
        assert await compute_types(http, fresh, fresh, {"inputs": "night"}) == ["cpu-fp32"] * 3
    nothing_kept = IngressUserConfig(cache=CacheSettings(max_bytes=0))
    async with InProcess(tiny_store, settings=nothing_kept).client() as http:
        assert await compute_types(http, {"inputs": "a"}, {"inputs": "a"}) == ["cpu-fp32"] * 2


async def test_failure_is_not_cached(tiny_store: Path) -> None:
    failing = FailingEncoder(EngineFailed("the engine gave up"))
    async with InProcess(tiny_store, encoder=failing).client() as http:
        responses = [await http.post(EMBED, json={"inputs": "night"}) for _ in range(2)]
    assert [(r.status_code, r.json()["code"]) for r in responses] == [(500, "engine_failed")] * 2


async def test_request_with_all_permitted_items_fits_an_idle_server(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=3, inflight_items=3))
    inputs = {"source_sentence": "night", "sentences": ["a", "b", "c"]}
    async with InProcess(tiny_store, settings=settings).client() as http:
        path = f"/models/{EMBEDDER}/pipeline/sentence-similarity"
        response = await http.post(path, json={"inputs": inputs})
    assert response.status_code == 200, response.text


async def test_full_item_limit_answers_429_until_items_are_released(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=3, inflight_items=3))
    server = InProcess(tiny_store, settings=settings, batched=batch_by(2))
    async with server.client() as http:
        waiting = asyncio.ensure_future(http.post(EMBED, json={"inputs": ["a", "b"]}))
        await wait_until(lambda: server.pipeline.admission.items.used == 2)
        rejected = await http.post(EMBED, json={"inputs": ["c", "d"]})
        in_openai_words = await http.post("/v1/embeddings", json={"input": ["c", "d"]})
        fits, first = await asyncio.gather(http.post(EMBED, json={"inputs": "e"}), waiting)
    assert rejected.status_code == 429
    assert rejected.headers["retry-after"] == "1"
    assert rejected.json() == {
        "error": "`limits.inflight_items` is reached: 2 of 3 texts are in use, the request needs "
        "2. Retry later.",
        "code": "overloaded",
        "error_type": "overloaded",
    }
    assert in_openai_words.status_code == 429
    assert in_openai_words.json()["error"]["type"] == "rate_limit_error"
    assert in_openai_words.headers["retry-after"] == "1"
    assert in_openai_words.headers["x-should-retry"] == "true"
    assert (first.status_code, fits.status_code) == (200, 200)
    assert server.pipeline.admission.items.used == 0


async def test_overloaded_encoder_answers_429(tiny_store: Path) -> None:
    async with InProcess(tiny_store, encoder=FailingEncoder(Overloaded("full"))).client() as http:
        response = await http.post(EMBED, json={"inputs": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_request_beyond_its_deadline_answers_504(tiny_store: Path) -> None:
    async with InProcess(tiny_store, encoder=HangingEncoder(), settings=HASTY).client() as http:
        response = await http.post(EMBED, json={"inputs": "a"})
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    assert "retry-after" not in response.headers


async def test_starting_encoder_answers_503_with_an_estimate(tiny_store: Path) -> None:
    starting = InProcess(
        tiny_store, encoder=HangingEncoder(), settings=HASTY, running={"Tokenizer": 1}
    )
    async with starting.client() as http:
        hugging_face = await http.post(EMBED, json={"inputs": "a"})
        openai = await http.post("/v1/embeddings", json={"input": "a"})
    assert hugging_face.status_code == openai.status_code == 503
    assert hugging_face.headers["retry-after"] == openai.headers["retry-after"] == "20"
    assert hugging_face.json() == {
        "error": f"Model {EMBEDDER} is currently loading",
        "code": "model_loading",
        "estimated_time": 20.0,
    }
    assert openai.json()["error"]["code"] == "model_loading"
    assert openai.json()["error"]["type"] == "server_error"


async def test_wait_for_model_waits_up_to_the_timeout(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, encoder = LoopClock(monkeypatch), HangingEncoder()
    settings = IngressUserConfig(timeout_s=2 * TIMEOUT_S, cold_start_wait_s=0.0)
    starting = InProcess(tiny_store, encoder=encoder, settings=settings, running={})
    async with starting.client() as http:
        async with asyncio.timeout(TIMEOUT_S):
            hasty = await http.post(EMBED, json={"inputs": "a"})
        sent = encoder.batches
        body = {"inputs": "a", "options": {"wait_for_model": True}}
        waiting = asyncio.ensure_future(http.post(EMBED, json=body))
        await wait_until(lambda: encoder.batches > sent)
        await clock.advance(TIMEOUT_S)
        assert not waiting.done()
        await clock.advance(TIMEOUT_S)
        patient = await waiting
    for response in (hasty, patient):
        assert (response.status_code, response.json()["code"]) == (503, "model_loading")


async def test_idle_gpu_encoder_is_loading_while_the_cpu_serves(tiny_store: Path) -> None:
    one_sleeps = {"Tokenizer": 1, "CpuEncoder": 1, "GpuEncoder": 0}
    server = InProcess(
        tiny_store,
        gpus=1,
        running=one_sleeps,
        encoder=HangingEncoder(),
        settings=HASTY,
    )
    async with server.client() as http:
        asleep = await http.post(EMBED, json={"inputs": "a"}, headers={"x-use-gpu": "1"})
        awake = await http.post(EMBED, json={"inputs": "a"})
    assert asleep.json()["code"] == "model_loading"
    assert awake.json()["code"] == "deadline_exceeded"


async def test_every_request_is_recorded_once_with_the_known_labels(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        await http.post(EMBED, json={"inputs": ["a", "b"]})
        await http.post(EMBED, json={"inputs": ["a", "b"]})
        await http.post(EMBED, json={"inputs": ""})
        await http.post("/models/no/such", json={"inputs": "a"})
        await http.post(f"/models/{CLASSIFIER}", json={"inputs": "a b"})
    known = [(r.model, r.task, r.compute, r.status, r.items) for r in server.recorder.records]
    assert known == [
        (EMBEDDER, "feature-extraction", "cpu-fp32", 200, 2),
        (EMBEDDER, "feature-extraction", "cache", 200, 2),
        (EMBEDDER, "feature-extraction", "none", 400, 0),
        ("none", "none", "none", 404, 0),
        (CLASSIFIER, "text-classification", "cpu-fp32", 200, 1),
    ]
    assert all(0 < r.total_s < 30 for r in server.recorder.records)


async def test_requests_rejected_before_the_pipeline_are_recorded(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        await http.post(EMBED, content=b"[")
        await http.post(EMBED, content=b"1" * 3_000_000)
        await http.get("/nothing")
        await http.post("/v1/chat/completions", json={"messages": []})
        await http.post("/rerank", json={"query": "a", "documents": []})
        await http.get("/health")
    assert [(r.model, r.status) for r in server.recorder.records] == [
        ("none", 400),
        ("none", 413),
        ("none", 404),
        ("none", 400),
        ("none", 400),
    ]
    assert all(0 < r.total_s < 30 for r in server.recorder.records)


@pytest.mark.parametrize(
    "leave",
    [AsgiClient.disconnect, lambda client: client.task.cancel()],
    ids=["message", "cancelled task"],
)
async def test_request_whose_client_leaves_is_recorded(
    leave: Callable[[AsgiClient], object], tiny_store: Path
) -> None:
    """Plain ASGI reports a client that leaves by a message, Ray Serve by a cancelled task."""
    encoder = HangingEncoder()
    server = InProcess(tiny_store, encoder=encoder)
    async with server.application() as app:
        client = AsgiClient(app, EMBED, {"inputs": "a"})
        await wait_until(lambda: encoder.batches == 1)
        leave(client)
        await wait_until(client.task.done)
    assert [(r.model, r.status, r.items) for r in server.recorder.records] == [(EMBEDDER, 499, 1)]


async def test_client_that_leaves_during_its_upload_has_made_no_mistake(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.application() as app:
        client = AsgiClient(app, EMBED, {"inputs": "a"}, uploads=True)
        client.disconnect()
        await client.task
    assert [r.status for r in server.recorder.records] == [499]


@pytest.mark.parametrize(
    ("status", "total_s", "level"),
    [
        (200, 0.01, logging.DEBUG),
        (200, 1.5, logging.INFO),
        (404, 0.01, logging.INFO),
        (500, 0.01, logging.WARNING),
        (503, 0.01, logging.WARNING),
    ],
)
def test_log_level_is_raised_for_slow_and_failed_requests(
    status: int, total_s: float, level: int
) -> None:
    assert select_log_level(status, total_s) == level


async def test_log_lines_omit_the_text(tiny_store: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ray.serve.hundredfold")
    async with InProcess(tiny_store).client() as http:
        await http.post(EMBED, json={"inputs": "secretword"})
        await http.post(EMBED, json={"inputs": ["secretword " * 40]})
    messages = [r.getMessage() for r in caplog.records if r.module == "request_log"]
    assert len(messages) == 2
    assert not any("secretword" in line for line in messages)


async def test_new_settings_apply_to_new_requests_without_a_restart(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        before = await http.post(EMBED, json={"inputs": ["a", "b"]})
        server.pipeline.configure(IngressUserConfig(limits=LimitSettings(items=1)))
        after = await http.post(EMBED, json={"inputs": ["a", "b"]})
    assert (before.status_code, after.status_code) == (200, 422)


async def test_cache_hits_are_in_the_header_and_the_records(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    past_the_cache = {"inputs": "night", "options": {"use_cache": False}}
    async with server.client() as http:
        responses = [
            await http.post(EMBED, json=body)
            for body in ({"inputs": "night"}, {"inputs": "night"}, past_the_cache)
        ]
        await http.post(EMBED, json={"inputs": ""})
    assert [r.headers["x-cache"] for r in responses] == ["miss", "hit", "miss"]
    assert [r.cache for r in server.recorder.records] == ["miss", "hit", "none", "none"]
    assert all(r.cache_bytes > 0 for r in server.recorder.records)


class RefusingEncoder(HangingEncoder):
    """An encoder that holds the first micro-batch and refuses all others with a predicted time."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        if not self.batches:
            await super().infer(batch, deliver)
        self.batches += 1
        for index in range(len(batch.calls)):
            deliver(index, build_overloaded("the queue is too long", 12.4, 42.4))


async def test_refusal_of_a_replica_is_repeated_without_asking_it(tiny_store: Path) -> None:
    encoder = RefusingEncoder()
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        held = asyncio.ensure_future(http.post(EMBED, json={"inputs": "first"}))
        await wait_until(lambda: encoder.batches == 1)
        started_s = time.monotonic()
        refused = await http.post(EMBED, json={"inputs": "second"})
        repeated = await http.post("/v1/embeddings", json={"input": "third, longer"})
        elapsed_s = time.monotonic() - started_s
        assert encoder.batches == 2
        shorter = await http.post(EMBED, json={"inputs": "4th"})
        assert encoder.batches == 3
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
    assert [one.status_code for one in (refused, repeated, shorter)] == [429] * 3
    assert refused.headers["retry-after"] == "13"
    assert 12.4 - elapsed_s <= int(repeated.headers["retry-after"]) <= 13
    assert repeated.json()["error"]["type"] == "rate_limit_error"


async def test_refusal_of_one_model_is_not_repeated_for_another(tiny_store: Path) -> None:
    encoder = RefusingEncoder()
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        held = asyncio.ensure_future(http.post(EMBED, json={"inputs": "first"}))
        await wait_until(lambda: encoder.batches == 1)
        await http.post(EMBED, json={"inputs": "second"})
        await http.post(f"/models/{CLASSIFIER}", json={"inputs": "second"})
        assert encoder.batches == 3
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_idle_server_asks_the_replica_after_a_refusal(tiny_store: Path) -> None:
    encoder = RefusingEncoder()
    encoder.batches = 1  # as if the first micro-batch, which is held, had ended
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        for _ in range(2):
            assert (await http.post(EMBED, json={"inputs": "same"})).status_code == 429
    assert encoder.batches == 3
