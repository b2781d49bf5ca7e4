"""Conversion of batches to inputs of encoder graphs, padding to buckets, and outputs per item."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.types import ModelHead
from deployments.engines.forward_pass import Batch
from deployments.errors import EngineFailed


class Bucket(NamedTuple):
    """A shape to which batches are padded.

    Its array `mask_positions` is [items], so it fits batches with at most `items` mask tokens.
    """

    items: int
    tokens: int  # tokens per item


def smallest_fitting(buckets: Collection[Bucket], feeds: Feeds) -> Bucket | None:
    """Return the bucket with the least padding for a batch; None if the batch fits no bucket."""
    items, tokens = feeds.arrays["input_ids"].shape
    masks = sum(feeds.mask_counts)
    fitting = (b for b in buckets if b.items >= max(items, masks) and b.tokens >= tokens)
    return min(fitting, key=lambda b: (b.items * b.tokens, b.tokens), default=None)


def empty_arrays(names: Collection[str], bucket: Bucket) -> dict[str, NDArray[np.int64]]:
    """Create arrays for the inputs `names`: attention_mask filled with 1, the others with 0.

    Each array is [items, tokens] of the bucket, but `mask_positions` is [items].
    """
    sizes = {name: bucket.items if name == MASK_POSITIONS else bucket for name in names}
    arrays = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
    if "attention_mask" in arrays:
        arrays["attention_mask"][:] = 1
    return arrays


def write_padded(arrays: dict[str, NDArray[np.int64]], feeds: Feeds) -> None:
    """Write a batch into `arrays` of a fitting bucket and pad the rest.

    Missing tokens get id 0 and mask 0. Missing items repeat the first item, because softmax over a
    fully masked row gives NaN. In dynamic int8 graphs, whose ranges span the batch, a NaN in one
    row would reach every row. Missing mask positions refer to the first token.
    """
    items, tokens = feeds.arrays["input_ids"].shape
    for name, array in feeds.arrays.items():
        target = arrays[name]
        if name == MASK_POSITIONS:
            row, column = np.divmod(array, tokens)
            target[: len(array)] = row * arrays["input_ids"].shape[1] + column
            target[len(array) :] = 0
            continue
        target[:items, :tokens] = array
        target[items:, :tokens] = array[0]
        target[:, tokens:] = 0


def pad(feeds: Feeds, bucket: Bucket) -> dict[str, NDArray[np.int64]]:
    """Return the arrays of a batch, padded to a fitting bucket."""
    arrays = empty_arrays(feeds.arrays, bucket)
    write_padded(arrays, feeds)
    return arrays


MASK_POSITIONS = "mask_positions"
# All possible inputs of a graph: [B, T], except `mask_positions` [M].
INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", MASK_POSITIONS})
# Optional output of graphs with the head VECTOR: the unpooled vectors, [B, T, `token_width`].
TOKENS_OUTPUT = "tokens"


@dataclass(frozen=True, slots=True)
class Feeds:
    """Inputs of one forward pass by name. Contains only the inputs that the graph has."""

    arrays: dict[str, NDArray[np.int64]]
    mask_counts: tuple[int, ...]  # [B], mask tokens per item; empty without `mask_positions`


@dataclass(frozen=True, slots=True)
class OutputNames:
    """Names of the outputs of a graph."""

    output: str  # the output of the head
    tokens: str | None  # TOKENS_OUTPUT, if the graph has it

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Select the outputs to use. `names` are all outputs of a graph, in the graph's order."""
        return cls(names[0], TOKENS_OUTPUT if TOKENS_OUTPUT in names[1:] else None)

    def select(self, batch: Batch) -> str:
        """Return the output that `batch` requests. Raises EngineFailed if the graph lacks it."""
        if not batch.unpooled:
            return self.output
        if self.tokens is None:
            raise EngineFailed("the graph has no unpooled output")
        return self.tokens


def check_inputs(names: Collection[str]) -> None:
    """Raise EngineFailed for an unknown input or a missing `input_ids`."""
    if unknown := sorted(set(names) - INPUTS):
        raise EngineFailed(f"the graph has the unknown input `{unknown[0]}`")
    if "input_ids" not in names:
        raise EngineFailed("the graph has no input `input_ids`")


def build_feeds(batch: Batch, names: Collection[str], mask_token: int | None) -> Feeds:
    """Return the inputs `names` of a graph for `batch`.

    `mask_positions` are ascending indices into the B * T tokens. A batch without mask tokens gets
    position 0, whose output is dropped.
    """
    arrays = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": batch.token_type_ids,
    }
    selected = {name: array for name, array in arrays.items() if name in names}
    if MASK_POSITIONS not in names:
        return Feeds(selected, ())
    masks = (batch.input_ids == mask_token) & (batch.attention_mask != 0)
    positions = np.flatnonzero(masks)
    selected[MASK_POSITIONS] = positions if len(positions) else np.zeros(1, dtype=np.int64)
    return Feeds(selected, tuple(masks.sum(axis=1).tolist()))


def split(
    head: ModelHead, raw: NDArray[np.float32], batch: Batch, mask_counts: Sequence[int]
) -> Sequence[NDArray[np.float32]]:
    """Split an output into one array per item without padding, as views of `raw`.

    `raw` is at least [B, W] for VECTOR, LABELS and SPARSE. For TOKENS, SPAN and unpooled outputs,
    it is at least [B, T, W]. For MASKS, it is at least [M, W], where M is the sum of `mask_counts`
    [B]. Drops padding: the entries beyond B and M, and the tokens beyond the length of each item.
    Raises EngineFailed if `raw` is smaller.
    """
    items, tokens = batch.input_ids.shape
    if head is ModelHead.MASKS:
        ends = np.cumsum(mask_counts)
        _check_shape(raw, (int(ends[-1]),))
        return [raw[end - n : end] for end, n in zip(ends, mask_counts, strict=True)]
    if head in (ModelHead.TOKENS, ModelHead.SPAN) or batch.unpooled:
        _check_shape(raw, (items, tokens))
        return [row[:n] for row, n in zip(raw[:items], batch.lengths, strict=True)]
    _check_shape(raw, (items,))
    return cast("Sequence[NDArray[np.float32]]", raw[:items])  # an array is a sequence of its rows


def _check_shape(raw: NDArray[np.float32], min_shape: tuple[int, ...]) -> None:
    fits = raw.ndim == len(min_shape) + 1 and all(
        n >= m for n, m in zip(raw.shape, min_shape, strict=False)
    )
    if not fits:
        expected = ", ".join([*map(str, min_shape), "width"])
        raise EngineFailed(
            f"the graph returned shape {list(raw.shape)}; expected at least [{expected}]"
        )
