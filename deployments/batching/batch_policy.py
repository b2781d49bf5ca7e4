"""Batch selection by item length, and collation. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployments.config import BatchSettings
from deployments.engines.forward_pass import Batch
from deployments.messages import TokenizedItem

# Maximum number of items considered per batch: far more than a batch holds, but few enough to sort
# in microseconds.
LOOK_AHEAD = 512


def plan_batch(lengths: Sequence[int], settings: BatchSettings, idle_threads: int = 1) -> list[int]:
    """Return the indices of the items for the next pass, shortest first; never empty.

    `lengths` are the token counts of at least one item, in order of arrival. Idle engine threads
    share the items, because two half batches in parallel take less time than one whole batch.
    The settings limit the items, the padded tokens and the padding of a pass. The oldest item is
    always selected, even if it alone exceeds the token budget.
    """
    considered = lengths[:LOOK_AHEAD]
    order = sorted(range(len(considered)), key=considered.__getitem__)  # stable: ties by arrival
    share = -(-len(considered) // max(idle_threads, 1))
    window = _LengthWindow([considered[i] for i in order], start=order.index(0))
    while window.count < min(settings.max_batch_items, share) and window.grow(settings):
        pass
    return order[window.low : window.high]


class _LengthWindow:
    """A slice of sorted lengths, `low` to `high` (exclusive), that grows by one item at a time."""

    def __init__(self, lengths: list[int], start: int) -> None:
        self._lengths = lengths
        self.low = start
        self.high = start + 1
        self._padding = 0

    @property
    def count(self) -> int:
        return self.high - self.low

    def grow(self, settings: BatchSettings) -> bool:
        """Add the adjacent item that causes less padding. If it does not fit, add the other one.

        Return False if neither fits.
        """
        longest = self._lengths[self.high - 1]
        sides: list[tuple[int, int, int]] = []  # padding, low, high after growing
        if self.low > 0:
            shorter = self._lengths[self.low - 1]
            sides.append((longest - shorter, self.low - 1, self.high))
        if self.high < len(self._lengths):
            longer = self._lengths[self.high]
            sides.append(((longer - longest) * self.count, self.low, self.high + 1))
        for padding, low, high in sorted(sides):
            fits_budget = self._lengths[high - 1] * (high - low) <= settings.max_batch_tokens
            if fits_budget and self._padding + padding <= settings.pass_overhead_tokens:
                self._padding += padding
                self.low, self.high = low, high
                return True
        return False


def collate(items: Sequence[TokenizedItem], *, unpooled: bool = False) -> Batch:
    """Pad items with id 0 and mask 0 to the length of the longest item."""
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
