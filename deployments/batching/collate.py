"""Ragged items to one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployments.messages import Batch, TokenIds


def collate(items: Sequence[TokenIds]) -> Batch:
    """Pad items (token ids, [T_i] each) to the longest of them; id 0 fills, mask 0 hides."""
    shape = (len(items), max(len(item) for item in items))
    input_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, item in enumerate(items):
        input_ids[row, : len(item)] = item
        attention_mask[row, : len(item)] = 1
    return Batch(input_ids, attention_mask)
