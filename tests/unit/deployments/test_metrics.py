from __future__ import annotations

import pytest

from deployments.metrics import (
    DURATION_BUCKETS,
    SIZE_BUCKETS,
    EncoderMetrics,
    IngressMetrics,
    TokenizerMetrics,
)
from deployments.records import ForwardPassRecord, RequestRecord, TokenizeRecord

# Ray's metrics refuse labels that were not declared and counts that are not positive; without a
# cluster they go nowhere.


@pytest.mark.parametrize(("status", "compute"), [(200, "cpu-int8"), (200, "cache"), (404, "none")])
def test_every_kind_of_request_can_be_published(status: int, compute: str) -> None:
    cache = "hit" if compute == "cache" else "none"
    IngressMetrics().record(
        RequestRecord("org/name", "none", compute, status, 0, 0.001, cache, cache_bytes=9)
    )


@pytest.mark.parametrize("padded_tokens", [64, 80])
def test_a_pass_can_be_published_with_and_without_padding(padded_tokens: int) -> None:
    EncoderMetrics().record(
        ForwardPassRecord("org/name", "cpu-int8", 4, 64, padded_tokens, 0.0, 0.01, 0)
    )


def test_an_encoded_list_can_be_published() -> None:
    TokenizerMetrics().record(TokenizeRecord("org/name", 0.0001, texts=3, cache_hits=1))
    TokenizerMetrics().record(TokenizeRecord("org/name", 0.0001, texts=0, cache_hits=0))


def test_buckets_cover_what_a_request_may_take_and_hold() -> None:
    assert sorted(DURATION_BUCKETS) == DURATION_BUCKETS
    assert DURATION_BUCKETS[0] <= 0.0005, "an ingress answers from memory in under a millisecond"
    assert DURATION_BUCKETS[-1] > 25, "the longest wait for an encoder that starts"
    assert (SIZE_BUCKETS[0], SIZE_BUCKETS[-1]) == (1, 1024)
