from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.engine_timing import CoreSplit
from benchmarks.common.statistics import summarize
from benchmarks.serving.load import LoadResult
from benchmarks.serving.results import EngineThroughput, LoadLevel, served_over_engine


def level(connections: int, *rates: int) -> LoadLevel:
    """Summarize rounds of 1 s with the given numbers of answers."""
    return LoadLevel.summarize(
        [LoadResult(connections, 1.0, np.full(rate, 0.01), {}, cpu_s=0.1) for rate in rates]
    )


def test_served_over_engine_is_a_ratio_within_rounds() -> None:
    engine = [
        EngineThroughput(CoreSplit(1, 2), summarize([100.0, 200.0, 400.0])),
        EngineThroughput(CoreSplit(2, 1), summarize([50.0, 50.0, 50.0])),
    ]
    levels = [level(1, 10, 10, 10), level(64, 60, 50, 200)]
    assert served_over_engine(levels, engine) == pytest.approx(0.5), "medians would give 0.3"
    assert served_over_engine(levels, []) is None
