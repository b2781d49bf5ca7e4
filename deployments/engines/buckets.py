"""Shapes that batches are padded up to, so that memory and compiled code can be made once."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deployments.engines.heads import MASK_POSITIONS, Feeds


class Bucket(NamedTuple):
    """Room for this many items of this many tokens, and for as many mask tokens as items."""

    items: int
    tokens: int


def smallest_holding(buckets: Collection[Bucket], feeds: Feeds) -> Bucket | None:
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
