from __future__ import annotations

import pytest

from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import (
    INPUTS,
    Bucket,
    Feeds,
    build_feeds,
    pad,
    smallest_fitting,
    write_padded,
)
from tests.support.fakes import build_item

MASK = 9


def feeds(*items: list[int]) -> Feeds:
    return build_feeds(collate([build_item(ids) for ids in items]), INPUTS, MASK)


@pytest.mark.parametrize(
    ("items", "tokens", "expected"),
    [
        (1, 1, Bucket(1, 8)),
        (1, 9, Bucket(1, 16)),
        (2, 8, Bucket(4, 8)),
        (3, 3, Bucket(4, 8)),
        (2, 64, Bucket(2, 64)),
        (5, 8, None),
        (1, 65, None),
    ],
)
def test_smallest_fitting_has_the_least_padding(
    items: int, tokens: int, expected: Bucket | None
) -> None:
    buckets = [Bucket(2, 64), Bucket(4, 8), Bucket(1, 16), Bucket(1, 8)]
    assert smallest_fitting(buckets, feeds(*[[1] * tokens] * items)) == expected


def test_smallest_fitting_prefers_fewer_tokens() -> None:
    buckets = [Bucket(2, 16), Bucket(4, 8)]
    assert smallest_fitting(buckets, feeds([1])) == Bucket(4, 8)


def test_bucket_limits_mask_tokens() -> None:
    assert smallest_fitting([Bucket(2, 8)], feeds([MASK, MASK])) == Bucket(2, 8)
    assert smallest_fitting([Bucket(2, 8)], feeds([MASK, MASK, MASK])) is None


def test_pad_masks_tokens_and_repeats_the_first_item() -> None:
    arrays = pad(feeds([1, MASK], [3]), Bucket(3, 4))
    assert arrays["input_ids"].tolist() == [[1, MASK, 0, 0], [3, 0, 0, 0], [1, MASK, 0, 0]]
    assert arrays["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert arrays["attention_mask"].any(axis=1).all()
    assert arrays["mask_positions"].tolist() == [1, 0, 0]


def test_pad_adapts_mask_positions() -> None:
    arrays = pad(feeds([1, 2, 3], [1, MASK]), Bucket(2, 16))
    assert arrays["mask_positions"].tolist() == [17, 0]


def test_write_padded_overwrites_the_previous_batch() -> None:
    arrays = pad(feeds([5] * 8, [6] * 8, [7] * 8), Bucket(4, 8))
    write_padded(arrays, feeds([1]))
    assert arrays["input_ids"].tolist() == [[1] + [0] * 7] * 4
    assert arrays["attention_mask"].tolist() == [[1] + [0] * 7] * 4
