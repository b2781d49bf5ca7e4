from __future__ import annotations

import pytest

from deployments.batching.batches import collate
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
def test_the_bucket_with_the_least_padding_is_chosen(
    items: int, tokens: int, expected: Bucket | None
) -> None:
    buckets = [Bucket(2, 64), Bucket(4, 8), Bucket(1, 16), Bucket(1, 8)]
    assert smallest_fitting(buckets, feeds(*[[1] * tokens] * items)) == expected


def test_equal_padding_goes_to_the_shorter_bucket() -> None:
    buckets = [Bucket(2, 16), Bucket(4, 8)]
    assert smallest_fitting(buckets, feeds([1])) == Bucket(4, 8)


def test_more_masks_than_a_bucket_has_items_do_not_fit() -> None:
    assert smallest_fitting([Bucket(2, 8)], feeds([MASK, MASK])) == Bucket(2, 8)
    assert smallest_fitting([Bucket(2, 8)], feeds([MASK, MASK, MASK])) is None


def test_missing_tokens_are_hidden_and_missing_items_repeat_the_first() -> None:
    arrays = pad(feeds([1, MASK], [3]), Bucket(3, 4))
    assert arrays["input_ids"].tolist() == [[1, MASK, 0, 0], [3, 0, 0, 0], [1, MASK, 0, 0]]
    assert arrays["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert arrays["attention_mask"].any(axis=1).all()
    assert arrays["mask_positions"].tolist() == [1, 0, 0]


def test_mask_positions_follow_their_tokens_into_the_wider_rows() -> None:
    arrays = pad(feeds([1, 2, 3], [1, MASK]), Bucket(2, 16))
    assert arrays["mask_positions"].tolist() == [17, 0]


def test_nothing_of_the_last_batch_is_left() -> None:
    arrays = pad(feeds([5] * 8, [6] * 8, [7] * 8), Bucket(4, 8))
    write_padded(arrays, feeds([1]))
    assert arrays["input_ids"].tolist() == [[1] + [0] * 7] * 4
    assert arrays["attention_mask"].tolist() == [[1] + [0] * 7] * 4
