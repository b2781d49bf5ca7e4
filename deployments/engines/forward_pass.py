"""Inputs and outputs of one forward pass of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass: B items, each padded to T tokens."""

    input_ids: NDArray[np.int64]  # [B, T]
    attention_mask: NDArray[np.int64]  # [B, T], 0 = padding
    token_type_ids: NDArray[np.int64]  # [B, T], 1 = second segment
    lengths: tuple[int, ...]  # [B], tokens of each item without padding
    unpooled: bool = False  # request one vector per token from a pooling model

    def halves(self) -> tuple[Self, Self]:
        """Split the items into two batches of the same padded length."""
        middle = len(self.lengths) // 2
        return self._slice(0, middle), self._slice(middle, len(self.lengths))

    def _slice(self, first: int, end: int) -> Self:
        return replace(
            self,
            input_ids=self.input_ids[first:end],
            attention_mask=self.attention_mask[first:end],
            token_type_ids=self.token_type_ids[first:end],
            lengths=self.lengths[first:end],
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one forward pass without padding; `items[i]` belongs to item i of the batch.

    Each item has the shape that ModelHead states: [W], [T_i, W], [T_i, 2] or [M_i, W]. An item of
    an unpooled batch is [T_i, `token_width`]. For outputs of the shape [W], `items` may be one
    array [B, W], with one item per row.
    """

    items: Sequence[NDArray[np.float32]]
