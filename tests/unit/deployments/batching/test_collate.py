from __future__ import annotations

import numpy as np

from deployments.batching.batch_policy import collate
from tests.support.fakes import build_item


def test_collate_pads_to_the_longest_item_and_masks_padding() -> None:
    batch = collate([build_item([7, 8]), build_item([1, 2, 3])])
    assert batch.input_ids.tolist() == [[7, 8, 0], [1, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.token_type_ids.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert batch.lengths == (2, 3)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int64


def test_collate_gives_second_segments_type_one() -> None:
    batch = collate([build_item([7, 8, 9], second_segment_start=1), build_item([1, 2, 3, 4])])
    assert batch.token_type_ids.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert batch.token_type_ids.dtype == np.int64
