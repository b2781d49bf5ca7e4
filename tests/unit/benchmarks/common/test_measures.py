from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.statistics import percentiles_ms, summarize


def test_percentiles_are_milliseconds_by_linear_interpolation() -> None:
    latencies_s = np.arange(1, 102) / 1000  # 1 ms to 101 ms
    assert percentiles_ms(latencies_s) == pytest.approx(
        {"p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0}
    )


def test_percentiles_do_not_depend_on_the_order() -> None:
    shuffled = np.random.default_rng(0).permutation(np.arange(1, 102)) / 1000
    assert percentiles_ms(shuffled) == percentiles_ms(np.sort(shuffled))


def test_percentiles_without_latencies_are_empty() -> None:
    assert percentiles_ms([]) == {}


@pytest.mark.parametrize(
    ("values", "median"), [([3.0], 3.0), ([5.0, 1.0, 4.0], 4.0), ([1.0, 2.0, 4.0, 9.0], 3.0)]
)
def test_summarize_returns_the_median(values: list[float], median: float) -> None:
    summary = summarize(values)
    assert (summary.median, summary.low, summary.high) == (median, min(values), max(values))
    assert summary.values == tuple(values)


def test_spread_is_relative_to_the_median() -> None:
    assert summarize([90.0, 100.0, 115.0]).spread == pytest.approx(0.25)
    assert summarize([0.0, 0.0]).spread == 0.0


def test_summarize_without_rounds_raises() -> None:
    with pytest.raises(ValueError, match="no round"):
        summarize([])
