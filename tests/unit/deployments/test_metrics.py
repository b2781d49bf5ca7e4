from __future__ import annotations

import pytest

from deployments.load import Load
from deployments.messages import EncoderTimings
from deployments.metrics import (
    DURATION_BUCKETS,
    SIZE_BUCKETS,
    EncoderMetrics,
    IngressMetrics,
    LoadMetrics,
    ModelLabels,
    TokenizerMetrics,
)
from deployments.records import ForwardPassRecord, RequestRecord, TokenizeRecord

# Tests without an assertion fail if recording raises: Ray's metrics reject undeclared labels and
# counter increments that are not positive. Without a cluster, Ray drops the values.


@pytest.mark.parametrize(("status", "compute"), [(200, "cpu-int8"), (200, "cache"), (404, "none")])
def test_ingress_metrics_accept_every_kind_of_request(status: int, compute: str) -> None:
    cache = "hit" if compute == "cache" else "none"
    IngressMetrics().record(
        RequestRecord("org/name", "none", compute, status, 0, 0.001, cache, cache_bytes=9)
    )


@pytest.mark.parametrize("timings", [EncoderTimings(), EncoderTimings(forward_s=0.1, tokens=9)])
def test_ingress_metrics_accept_requests_with_a_key(timings: EncoderTimings) -> None:
    IngressMetrics().record(
        RequestRecord("org/name", "none", "cpu-int8", 200, 1, 0.001, timings=timings, key="alice")
    )


@pytest.mark.parametrize(
    ("items", "timings", "seconds"),
    [
        (1, EncoderTimings(forward_s=0.8, batch_items=8), 0.1),
        (64, EncoderTimings(forward_s=0.8, batch_items=32), 1.6),  # two passes of 32 items
        (1, EncoderTimings(forward_s=0.8), 0.8),  # generation, without a batch size
    ],
)
def test_seconds_of_hardware_are_the_share_of_a_request(
    items: int, timings: EncoderTimings, seconds: float
) -> None:
    record = RequestRecord("org/name", "none", "cpu-int8", 200, items, 1.0, timings=timings)
    assert record.compute_s == pytest.approx(seconds)


@pytest.mark.parametrize("padded_tokens", [64, 80])
def test_encoder_metrics_accept_passes_with_and_without_padding(padded_tokens: int) -> None:
    EncoderMetrics().record(
        ForwardPassRecord("org/name", "cpu-int8", 4, 64, padded_tokens, 0.0, 0.01, 0)
    )


def test_tokenizer_metrics_accept_empty_and_full_batches() -> None:
    TokenizerMetrics().record(TokenizeRecord("org/name", 0.0001, texts=3, cache_hits=1))
    TokenizerMetrics().record(TokenizeRecord("org/name", 0.0001, texts=0, cache_hits=0))


def test_load_metrics_accept_every_load() -> None:
    LoadMetrics("CpuEncoder").record(Load(0.0, 0.0))
    LoadMetrics("CpuEncoder").record(Load(1.0, 30.0))


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
