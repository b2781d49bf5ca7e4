from __future__ import annotations

import pytest

from benchmarks.common.engine_timing import COMPARED_SHAPE, ShapeLatency
from benchmarks.common.statistics import summarize
from benchmarks.engine.results import ENGINE, TORCH, name_system, torch_over_engine
from deployments.tuning.costs import Shape


def latency(name: str, ms: float, shape: Shape = COMPARED_SHAPE) -> ShapeLatency:
    return ShapeLatency(name, shape, summarize([ms]))


def test_latencies_of_other_thread_counts_have_other_names() -> None:
    assert name_system(ENGINE, 1) == "engine, 1 thread per pass"
    assert name_system(TORCH, 2) == "torch eager fp32, 2 threads per pass"


def test_torch_is_compared_with_the_faster_core_split() -> None:
    one_item = Shape(items=1, tokens=COMPARED_SHAPE.tokens)
    engine = [
        latency(name_system(ENGINE, 1), 20.0),
        latency(name_system(ENGINE, 2), 25.0),
        latency(name_system(ENGINE, 2), 5.0, one_item),
    ]
    torch = latency(name_system(TORCH, 2), 60.0)
    assert torch_over_engine([*engine, torch], 512) == pytest.approx(3.0)
    assert torch_over_engine(engine, 512) is None
