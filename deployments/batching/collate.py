"""Ragged items to one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployments.messages import Batch, EncodedItem


def collate(items: Sequence[EncodedItem], *, every_token: bool = False) -> Batch:
    """Pad items to the longest of them; id 0 fills, mask 0 hides."""
    lengths = tuple(len(ids) for ids, _ in items)
    shape = (len(items), max(lengths))
    input_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    token_type_ids = np.zeros(shape, dtype=np.int64)
    for row, (ids, second_from) in enumerate(items):
        length = lengths[row]
        input_ids[row, :length] = ids
        attention_mask[row, :length] = 1
        if second_from < length:
            token_type_ids[row, second_from:length] = 1
    return Batch(input_ids, attention_mask, token_type_ids, lengths, every_token)
