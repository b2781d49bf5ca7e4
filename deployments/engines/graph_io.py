"""From a batch to what a graph reads, and from what it answers to one array per item."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.types import ModelHead
from deployments.errors import EngineFailed
from deployments.messages import Batch


class Bucket(NamedTuple):
    """Room for this many items of this many tokens, and for as many mask tokens as items."""

    items: int
    tokens: int


def smallest_fitting(buckets: Collection[Bucket], feeds: Feeds) -> Bucket | None:
    """The bucket of least padding that a batch fits in; None when it fits in none."""
    items, tokens = feeds.arrays["input_ids"].shape
    masks = sum(feeds.mask_counts)
    holding = (b for b in buckets if b.items >= max(items, masks) and b.tokens >= tokens)
    return min(holding, key=lambda b: (b.items * b.tokens, b.tokens), default=None)


def empty_arrays(names: Collection[str], bucket: Bucket) -> dict[str, NDArray[np.int64]]:
    """Arrays of the bucket's size for the inputs `names`: id 0 everywhere, nothing hidden."""
    sizes = {name: bucket.items if name == MASK_POSITIONS else bucket for name in names}
    arrays = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
    if "attention_mask" in arrays:
        arrays["attention_mask"][:] = 1
    return arrays


def fill(arrays: dict[str, NDArray[np.int64]], feeds: Feeds) -> None:
    """Write a batch into `arrays` of a bucket that holds it, the rest padded.

    Missing tokens get id 0 and mask 0. Missing items repeat the first one: a row in which nothing
    is visible would divide by zero, and where ranges span the batch (dynamic int8) its NaN would
    reach every neighbour. Missing mask positions point at the first token.
    """
    items, tokens = feeds.arrays["input_ids"].shape
    for name, array in feeds.arrays.items():
        room = arrays[name]
        if name == MASK_POSITIONS:
            row, column = np.divmod(array, tokens)
            room[: len(array)] = row * arrays["input_ids"].shape[1] + column
            room[len(array) :] = 0
            continue
        room[:items, :tokens] = array
        room[items:, :tokens] = array[0]
        room[:, tokens:] = 0


def padded(feeds: Feeds, bucket: Bucket) -> dict[str, NDArray[np.int64]]:
    """The arrays of a batch padded up to `bucket`, which holds it."""
    arrays = empty_arrays(feeds.arrays, bucket)
    fill(arrays, feeds)
    return arrays


MASK_POSITIONS = "mask_positions"
# Every input a graph may have, [B, T] but for `mask_positions` [M].
INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", MASK_POSITIONS})
# The second output of graphs of the head VECTOR: what they pool, [B, T, W].
TOKENS_OUTPUT = "tokens"


@dataclass(frozen=True, slots=True)
class Feeds:
    """The inputs of one forward pass by name, int64; only those that the graph has."""

    arrays: dict[str, NDArray[np.int64]]
    mask_counts: tuple[int, ...]  # [B], mask tokens of each item; empty unless the head is MASKS


@dataclass(frozen=True, slots=True)
class OutputNames:
    """What a graph answers, by name."""

    answer: str  # what its head says
    tokens: str | None  # TOKENS_OUTPUT, where the graph has it

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Of a graph with the outputs `names`, in order."""
        return cls(names[0], TOKENS_OUTPUT if TOKENS_OUTPUT in names[1:] else None)

    def wanted(self, batch: Batch) -> str:
        """The one output that answers `batch`. Raises EngineFailed when the graph lacks it."""
        if not batch.unpooled:
            return self.answer
        if self.tokens is None:
            raise EngineFailed("the graph does not give the vectors of tokens")
        return self.tokens


def check_inputs(names: Collection[str]) -> None:
    """Raise EngineFailed when a graph reads what no batch has, or not what every batch has."""
    if unknown := sorted(set(names) - INPUTS):
        raise EngineFailed(f"the graph reads `{unknown[0]}`, which no batch has")
    if "input_ids" not in names:
        raise EngineFailed("the graph does not read `input_ids`")


def feeds_of(batch: Batch, names: Collection[str], mask_token: int | None) -> Feeds:
    """What the graph with inputs `names` is to read of `batch`.

    `mask_positions` are flat indices into B * T, in order; a batch without a mask token gets
    position 0, whose answer belongs to no item.
    """
    arrays = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": batch.token_type_ids,
    }
    chosen = {name: array for name, array in arrays.items() if name in names}
    if MASK_POSITIONS not in names:
        return Feeds(chosen, ())
    masks = (batch.input_ids == mask_token) & (batch.attention_mask != 0)
    positions = np.flatnonzero(masks)
    chosen[MASK_POSITIONS] = positions if len(positions) else np.zeros(1, dtype=np.int64)
    return Feeds(chosen, tuple(masks.sum(axis=1).tolist()))


def split(
    head: ModelHead, raw: NDArray[np.float32], batch: Batch, mask_counts: Sequence[int]
) -> Sequence[NDArray[np.float32]]:
    """One array per item, padding removed; all of them views of `raw`.

    `raw` is [B, W] for VECTOR and LABELS, [B, T, W] for TOKENS, SPAN and whatever answers
    `unpooled`, and [M, W] for MASKS, where M is the sum of `mask_counts` [B], or 1 when that is
    0. A larger B, T or M is padding and is cut off. Raises EngineFailed when the graph answered
    something smaller.
    """
    items, tokens = batch.input_ids.shape
    if head is ModelHead.MASKS:
        ends = np.cumsum(mask_counts)
        _check(raw, (int(ends[-1]),))
        return [raw[end - n : end] for end, n in zip(ends, mask_counts, strict=True)]
    if head in (ModelHead.TOKENS, ModelHead.SPAN) or batch.unpooled:
        _check(raw, (items, tokens))
        return [row[:n] for row, n in zip(raw[:items], batch.lengths, strict=True)]
    _check(raw, (items,))
    return cast("Sequence[NDArray[np.float32]]", raw[:items])  # as good as one, but not typed so


def _check(raw: NDArray[np.float32], least: tuple[int, ...]) -> None:
    fits = raw.ndim == len(least) + 1 and all(
        n >= m for n, m in zip(raw.shape, least, strict=False)
    )
    if not fits:
        due = [*map(str, least), "width"]
        raise EngineFailed(f"the graph answered {list(raw.shape)} where [{', '.join(due)}] is due")
