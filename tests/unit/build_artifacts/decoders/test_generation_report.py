from __future__ import annotations

import pytest

from build_artifacts.decoders.generation_report import common_prefix_length


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)],
)
def test_common_prefix_length(one: tuple[int, ...], other: tuple[int, ...], count: int) -> None:
    assert common_prefix_length(one, other) == count
    assert common_prefix_length(other, one) == count
