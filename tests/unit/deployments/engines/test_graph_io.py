from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import OutputNames, build_feeds, check_inputs, split
from deployments.errors import EngineFailed
from tests.support.fakes import build_item

MASK = 9
BATCH = collate([build_item([1, MASK, 2]), build_item([3]), build_item([MASK, MASK])])


def test_build_feeds_has_only_graph_inputs() -> None:
    assert build_feeds(BATCH, ["input_ids"], None).arrays.keys() == {"input_ids"}
    feeds = build_feeds(BATCH, ["attention_mask", "input_ids"], None)
    assert feeds.arrays["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert feeds.mask_counts == ()


def test_mask_positions_are_flat_indices_in_order() -> None:
    feeds = build_feeds(BATCH, ["input_ids", "mask_positions"], MASK)
    assert feeds.arrays["mask_positions"].tolist() == [1, 6, 7]
    assert feeds.mask_counts == (1, 0, 2)


def test_padding_is_not_a_mask_token() -> None:
    assert build_feeds(BATCH, ["input_ids", "mask_positions"], 0).mask_counts == (0, 0, 0)


def test_batch_without_mask_tokens_feeds_position_zero() -> None:
    batch = collate([build_item([1, 2])])
    feeds = build_feeds(batch, ["input_ids", "mask_positions"], MASK)
    assert feeds.arrays["mask_positions"].tolist() == [0]
    (rows,) = split(ModelHead.MASKS, np.ones((1, 5), np.float32), batch, feeds.mask_counts)
    assert rows.shape == (0, 5)


def test_split_returns_views() -> None:
    raw = np.arange(4 * 5 * 2, dtype=np.float32).reshape(4, 5, 2)
    tokens = split(ModelHead.TOKENS, raw, BATCH, ())
    assert [rows.shape for rows in tokens] == [(3, 2), (1, 2), (2, 2)]
    assert all(np.shares_memory(rows, raw) for rows in tokens)
    vectors = split(ModelHead.VECTOR, raw[:, 0], BATCH, ())
    assert isinstance(vectors, np.ndarray)
    np.testing.assert_array_equal(vectors, raw[:3, 0])
    masks = split(ModelHead.MASKS, raw[0], BATCH, (1, 0, 2))
    assert [rows[:, 0].tolist() for rows in masks] == [[0], [], [2, 4]]


def test_split_of_unpooled_batch() -> None:
    raw = np.arange(4 * 5 * 2, dtype=np.float32).reshape(4, 5, 2)
    batch = replace(BATCH, unpooled=True)
    rows = split(ModelHead.VECTOR, raw, batch, ())
    assert [row.tolist() for row in rows] == [
        row.tolist() for row in split(ModelHead.TOKENS, raw, BATCH, ())
    ]
    with pytest.raises(EngineFailed, match="expected at least"):
        split(ModelHead.VECTOR, raw[:, 0], batch, ())


@pytest.mark.parametrize(
    ("outputs", "tokens"),
    [(["output"], None), (["output", "tokens"], "tokens"), (["tokens"], None)],
)
def test_output_names_select(outputs: list[str], tokens: str | None) -> None:
    names = OutputNames.of(outputs)
    assert (names.output, names.tokens) == (outputs[0], tokens)
    assert names.select(BATCH) == outputs[0]
    if tokens is None:
        with pytest.raises(EngineFailed, match="no unpooled output"):
            names.select(replace(BATCH, unpooled=True))
    else:
        assert names.select(replace(BATCH, unpooled=True)) == tokens


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (ModelHead.VECTOR, (2, 4)),
        (ModelHead.LABELS, (3,)),
        (ModelHead.TOKENS, (3, 2, 4)),
        (ModelHead.SPAN, (3, 2)),
        (ModelHead.MASKS, (2, 4)),
    ],
)
def test_split_of_too_small_output_fails(head: ModelHead, shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineFailed, match="expected at least"):
        split(head, np.zeros(shape, np.float32), BATCH, (1, 0, 2))


def test_inputs_are_checked_by_name() -> None:
    check_inputs(["input_ids", "token_type_ids"])
    with pytest.raises(EngineFailed, match="`pixels`"):
        check_inputs(["input_ids", "pixels"])
    with pytest.raises(EngineFailed, match="`input_ids`"):
        check_inputs(["attention_mask"])
