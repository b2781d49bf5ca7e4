from __future__ import annotations

import numpy as np
import pytest

from deployments.top_indices import top_indices


@pytest.mark.parametrize("size", [1, 2, 63, 1000, 4097])
@pytest.mark.parametrize("count", [1, 2, 20, 1024])
def test_top_indices_matches_a_full_sort(size: int, count: int) -> None:
    for seed in range(20):
        row = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        row = row.round(1 if seed % 2 else 6)  # many ties, or almost none
        if seed % 3 == 0:
            row = np.sort(row)
        indices = top_indices(row, count).tolist()
        assert indices == np.argsort(-row, kind="stable")[:count].tolist()
