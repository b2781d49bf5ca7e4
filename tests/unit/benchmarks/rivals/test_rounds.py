from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rivals.rounds import estimate_s
from benchmarks.serving.load import LoadResult


def result(seconds: float, responses: int) -> LoadResult:
    return LoadResult(
        connections=1,
        seconds=seconds,
        latencies_s=np.full(responses, 0.1),
        failures={},
        cpu_s=0.0,
    )


@pytest.mark.parametrize(
    ("earlier", "expected_s"),
    [
        ([result(10.0, 80)], 1.0),
        ([result(10.0, 8), result(10.0, 80)], 1.0),
        ([result(0.2, 0)], 1.6),
        ([result(10.0, 0)], 80.0),
        ([result(10.0, 0), result(10.0, 80)], 1.0),
    ],
    ids=["one", "best", "short window without a response", "long one", "one of them"],
)
def test_duration_of_requests_is_estimated_from_earlier_rates(
    earlier: list[LoadResult], expected_s: float
) -> None:
    assert estimate_s(8, earlier) == pytest.approx(expected_s)
