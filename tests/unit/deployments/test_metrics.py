from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Literal, TypeAlias

import pytest
from ray.util.metrics import Counter, Gauge, Histogram, Metric

from deployments.load import Load
from deployments.messages import CallTimings
from deployments.metrics import (
    DURATION_BUCKETS,
    PREFIX,
    SIZE_BUCKETS,
    EncoderMetrics,
    GeneratorMetrics,
    IngressMetrics,
    LoadMetrics,
    ModelLabels,
    TokenizerMetrics,
)
from deployments.records import ForwardPassRecord, RequestRecord, StepRecord, TokenizeRecord

# Values and labels by name of the metric, without the prefix.
Recorded: TypeAlias = dict[str, list[tuple[float, dict[str, str]]]]

PASS = {"model": "org/name", "compute": "cpu-int8"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Record what is written to Ray's metrics, which still check labels and increments."""
    values: Recorded = defaultdict(list)

    def record_writes(kind: type[Metric], method: str) -> None:
        write = getattr(kind, method)

        def write_and_record(
            metric: Metric, value: float, tags: dict[str, str] | None = None
        ) -> None:
            write(metric, value, tags)
            name = metric.info["name"].removeprefix(f"{PREFIX}_")
            values[name].append((value, metric.info["default_tags"] | (tags or {})))

        monkeypatch.setattr(kind, method, write_and_record)

    record_writes(Counter, "inc")
    record_writes(Gauge, "set")
    record_writes(Histogram, "observe")
    return values


@pytest.mark.parametrize(
    ("status", "compute", "cache", "code"),
    [
        (200, "cpu-int8", "miss", "none"),
        (200, "cache", "hit", "none"),
        (404, "none", "none", "model_not_found"),
    ],
)
def test_ingress_metrics_record_every_kind_of_request(
    status: int,
    compute: str,
    cache: Literal["hit", "miss", "none"],
    code: str,
    recorded: Recorded,
) -> None:
    record = RequestRecord("org/name", "fill-mask", compute, status, 2, 0.001, cache, cache_bytes=9)
    IngressMetrics().record(replace(record, code=code))
    labels = {
        "model": "org/name",
        "task": "fill-mask",
        "compute": compute,
        "status": str(status),
    }
    expected: Recorded = {
        "requests": [(1, labels | {"code": code})],
        "request_seconds": [(0.001, labels)],
    }
    if cache != "none":
        expected["response_cache_lookups"] = [(1, {"model": "org/name", "result": cache})]
    if cache == "miss":
        expected["response_cache_bytes"] = [(9, {})]
    assert recorded == expected


@pytest.mark.parametrize(
    ("timings", "used"),
    [
        (CallTimings(), {}),
        (
            CallTimings(forward_s=0.8, tokens=9, batch_items=8),
            {"key_tokens": 9, "key_compute_seconds": pytest.approx(0.1)},
        ),
    ],
)
def test_ingress_metrics_record_what_a_key_uses(
    timings: CallTimings, used: dict[str, float], recorded: Recorded
) -> None:
    IngressMetrics().record(
        RequestRecord("org/name", "none", "cpu-int8", 200, 1, 0.001, timings=timings, key="alice")
    )
    labels = {"key": "alice", "compute": "cpu-int8"}
    assert {name: values for name, values in recorded.items() if name.startswith("key_")} == {
        "key_requests": [(1, {"key": "alice", "status": "200"})],
        **{name: [(value, labels)] for name, value in used.items()},
    }


def test_ingress_metrics_count_lost_spans(recorded: Recorded) -> None:
    IngressMetrics().record_lost_spans(512)
    assert recorded == {"lost_spans": [(512, {})]}


@pytest.mark.parametrize(
    ("items", "timings", "seconds"),
    [
        (1, CallTimings(forward_s=0.8, batch_items=8), 0.1),
        (64, CallTimings(forward_s=0.8, batch_items=32), 1.6),  # two passes of 32 items
        (1, CallTimings(forward_s=0.8), 0.8),  # generation, without a batch size
    ],
)
def test_seconds_of_hardware_are_the_share_of_a_request(
    items: int, timings: CallTimings, seconds: float
) -> None:
    record = RequestRecord("org/name", "none", "cpu-int8", 200, items, 1.0, timings=timings)
    assert record.compute_s == pytest.approx(seconds)


@pytest.mark.parametrize(("padded_tokens", "padding"), [(64, []), (80, [(16, PASS)])])
def test_encoder_metrics_record_tokens_apart_from_padding(
    padded_tokens: int, padding: list[tuple[float, dict[str, str]]], recorded: Recorded
) -> None:
    EncoderMetrics().record(
        ForwardPassRecord("org/name", "cpu-int8", 4, 64, padded_tokens, 0.002, 0.01, 3, 0.5)
    )
    assert recorded.pop("padding_tokens", []) == padding
    assert recorded == {
        "items": [(4, PASS)],
        "tokens": [(64, PASS)],
        "queue_seconds": [(0.002, PASS)],
        "forward_seconds": [(0.01, PASS)],
        "batch_items": [(4, PASS)],
        "waiting_items": [(3, {})],
        "waiting_seconds": [(0.5, {})],
    }


def test_generator_metrics_record_each_step(recorded: Recorded) -> None:
    metrics = GeneratorMetrics()
    metrics.record(StepRecord("org/name", "cpu-int8", 5, 3, 4, 2, 6, 7, 0.01, 1.5))
    metrics.record(StepRecord("org/name", "cpu-int8", 0, 0, 0, 0, 0, 0, 0.02))
    assert recorded == {
        "prompt_tokens": [(5, PASS)],
        "generated_tokens": [(3, PASS)],
        "draft_tokens": [(4, PASS)],
        "accepted_draft_tokens": [(2, PASS)],
        "generation_step_seconds": [(0.01, PASS), (0.02, PASS)],
        "running_requests": [(6, PASS), (0, PASS)],
        "waiting_requests": [(7, PASS), (0, PASS)],
        "generation_waiting_seconds": [(1.5, PASS), (0.0, PASS)],
    }


def test_tokenizer_metrics_record_hits_and_misses(recorded: Recorded) -> None:
    metrics = TokenizerMetrics()
    metrics.record(TokenizeRecord("org/name", 0.0001, texts=3, cache_hits=1))
    metrics.record(TokenizeRecord("org/name", 0.0002, texts=0, cache_hits=0))
    model = {"model": "org/name"}
    assert recorded == {
        "tokenization_seconds": [(0.0001, model), (0.0002, model)],
        "tokenization_cache_lookups": [
            (1, model | {"result": "hit"}),
            (2, model | {"result": "miss"}),
        ],
    }


def test_ingress_metrics_record_running_replicas(recorded: Recorded) -> None:
    IngressMetrics().record_replicas({"Ingress": 1, "GpuEncoder": 0})
    assert recorded == {
        "running_replicas": [(1, {"deployment": "Ingress"}), (0, {"deployment": "GpuEncoder"})],
        "response_cache_bytes": [(0, {})],
    }


def test_idle_replicas_record_their_gauges_again(recorded: Recorded) -> None:
    encoder, generator, ingress = EncoderMetrics(), GeneratorMetrics(), IngressMetrics()
    generator.record(StepRecord("org/name", "cpu-int8", 5, 3, 4, 2, 6, 7, 0.01, 1.5))
    ingress.record(
        RequestRecord("org/name", "fill-mask", "cpu-int8", 200, 2, 0.001, "miss", cache_bytes=9)
    )
    recorded.clear()
    encoder.record_idle()
    generator.record_idle()
    ingress.record_replicas({})
    assert recorded == {
        "waiting_items": [(0, {})],
        "waiting_seconds": [(0.0, {})],
        "running_requests": [(0, PASS)],
        "waiting_requests": [(0, PASS)],
        "generation_waiting_seconds": [(0.0, PASS)],
        "response_cache_bytes": [(9, {})],
    }


def test_load_metrics_record_busy_and_queued(recorded: Recorded) -> None:
    LoadMetrics("CpuEncoder").record(Load(busy=0.25, queued_s=30.0))
    deployment = {"deployment": "CpuEncoder"}
    assert recorded == {"busy_ratio": [(0.25, deployment)], "queued_seconds": [(30.0, deployment)]}


def test_buckets_cover_durations_and_sizes_of_requests() -> None:
    assert sorted(DURATION_BUCKETS) == DURATION_BUCKETS
    assert DURATION_BUCKETS[0] <= 0.0005, "a cache hit takes less than a millisecond"
    assert DURATION_BUCKETS[-1] > 25, "a starting encoder may take 25 s"
    assert (SIZE_BUCKETS[0], SIZE_BUCKETS[-1]) == (1, 1024)


def test_labels_of_models_are_bounded() -> None:
    label = ModelLabels(max_models=3)
    assert [label(f"org/model{number}") for number in range(5)] == [
        "org/model0",
        "org/model1",
        "org/model2",
        "other",
        "other",
    ]
    assert label("org/model1") == "org/model1"
