from __future__ import annotations

import numpy as np

from deployments.batching.collate import collate


def test_items_are_padded_to_the_longest_and_the_mask_hides_the_padding() -> None:
    short, long = np.array([7, 8], dtype=np.int32), np.array([1, 2, 3], dtype=np.int32)
    batch = collate([short, long])
    assert batch.input_ids.tolist() == [[7, 8, 0], [1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int64
