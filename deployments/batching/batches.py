"""Ragged items to one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployments.config import BatchSettings
from deployments.messages import Batch, TokenizedItem

# Items looked at per decision. Far more than a batch holds, few enough to sort in microseconds.
LOOK_AHEAD = 512


def plan(lengths: Sequence[int], rules: BatchSettings, idle_runs: int = 1) -> list[int]:
    """Indices of the items for the next pass, shortest first; never empty.

    `lengths` are token counts in order of arrival, at least one. With several idle engine
    threads the items are shared out, because two half batches at once beat one after the other.
    The oldest item runs even if it alone exceeds the budget.
    """
    considered = lengths[:LOOK_AHEAD]
    order = sorted(range(len(considered)), key=considered.__getitem__)  # stable: ties by arrival
    share = -(-len(considered) // max(idle_runs, 1))
    window = _Window([considered[i] for i in order], start=order.index(0))
    while window.count < min(rules.max_batch_items, share) and window.grow(rules):
        pass
    return order[window.low : window.high]


class _Window:
    """A run of sorted lengths, `low` to `high` (exclusive), that grows by one item at a time."""

    def __init__(self, lengths: list[int], start: int) -> None:
        self._lengths = lengths
        self.low = start
        self.high = start + 1
        self._padding = 0

    @property
    def count(self) -> int:
        """Items in the window."""
        return self.high - self.low

    def grow(self, rules: BatchSettings) -> bool:
        """Take the neighbour that brings less padding; False when neither pays."""
        longest = self._lengths[self.high - 1]
        sides: list[tuple[int, int, int]] = []  # padding, low, high after growing
        if self.low > 0:
            shorter = self._lengths[self.low - 1]
            sides.append((longest - shorter, self.low - 1, self.high))
        if self.high < len(self._lengths):
            longer = self._lengths[self.high]
            sides.append(((longer - longest) * self.count, self.low, self.high + 1))
        for padding, low, high in sorted(sides):
            within_budget = self._lengths[high - 1] * (high - low) <= rules.max_batch_tokens
            if within_budget and self._padding + padding <= rules.pass_overhead_tokens:
                self._padding += padding
                self.low, self.high = low, high
                return True
        return False


def collate(items: Sequence[TokenizedItem], *, unpooled: bool = False) -> Batch:
    """Pad items to the longest of them; id 0 fills, mask 0 hides."""
    lengths = tuple(len(ids) for ids, _ in items)
    shape = (len(items), max(lengths))
    input_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    token_type_ids = np.zeros(shape, dtype=np.int64)
    for row, (ids, second_segment_start) in enumerate(items):
        length = lengths[row]
        input_ids[row, :length] = ids
        attention_mask[row, :length] = 1
        if second_segment_start < length:
            token_type_ids[row, second_segment_start:length] = 1
    return Batch(input_ids, attention_mask, token_type_ids, lengths, unpooled)
