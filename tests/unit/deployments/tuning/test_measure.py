from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from deployments.artifacts.types import Device
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from deployments.tuning.costs import Shape
from deployments.tuning.measure import (
    ClockFunction,
    build_batch,
    choose_clock,
    measure,
    supported_shapes,
    wait_until_idle,
)
from tests.support.cost_tables import shape
from tests.support.fakes import FakeClock, ScriptedEngine, build_item

ITEMS = (build_item([2, 10, 11, 3]), build_item([2, 12, 3]))
SHAPES = tuple(map(shape, ("1x16", "4x16", "1x128", "8x128")))
AMPLE_S = 10_000.0


def build_batches(target_shape: Shape) -> tuple[Batch, ...]:
    return (build_batch(ITEMS, target_shape),)


class FakeTimeline:
    """Engines whose passes take a given time of a fake clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.passes: list[str] = []

    def engine(self, name: str, pass_s: Callable[[Batch], float]) -> ScriptedEngine:
        def act(batch: Batch) -> Outputs:
            self.passes.append(name)
            self.clock.now_s += pass_s(batch)
            return Outputs(np.zeros((len(batch.lengths), 1), dtype=np.float32))

        return ScriptedEngine(act)

    def per_token(self, name: str, ms: float) -> ScriptedEngine:
        """Create an engine that takes `ms` per padded token."""
        return self.engine(name, lambda batch: ms / 1e3 * batch.input_ids.size)


def medians(costs: dict, name: str) -> dict[str, float]:
    return {str(cost.shape): round(cost.median_ms, 3) for cost in costs[name]}


def test_every_engine_is_measured_at_every_shape() -> None:
    timeline = FakeTimeline()
    engines = {"a": timeline.per_token("a", 1.0), "b": timeline.per_token("b", 1.1)}
    costs = measure(engines, SHAPES, build_batches, AMPLE_S, timeline.clock)
    assert medians(costs, "a") == {"1x16": 16, "4x16": 64, "1x128": 128, "8x128": 1024}
    assert medians(costs, "b") == pytest.approx(
        {"1x16": 17.6, "4x16": 70.4, "1x128": 140.8, "8x128": 1126.4}
    )
    assert all(cost.rounds == 25 and cost.low_ms > 0 for cost in costs["a"])


def test_rounds_rotate_the_order_of_engines() -> None:
    timeline = FakeTimeline()
    engines = {name: timeline.per_token(name, 1.0) for name in "abc"}
    measure(engines, SHAPES[:1], build_batches, AMPLE_S, timeline.clock)
    warm_up, rounds = timeline.passes[:6], "".join(timeline.passes[6:])
    assert sorted(warm_up) == sorted("aabbcc")
    assert rounds.startswith("aabbccbbccaaccaabb")


def test_host_slowdown_keeps_the_ratio_of_engines() -> None:
    timeline = FakeTimeline()
    started_s = timeline.clock()

    def slow_down(factor: float) -> Callable[[Batch], float]:
        return lambda _: factor * (0.010 + 0.001 * (timeline.clock() - started_s))

    engines = {
        "a": timeline.engine("a", slow_down(1.0)),
        "b": timeline.engine("b", slow_down(1.05)),
    }
    costs = measure(engines, SHAPES[:1], build_batches, AMPLE_S, timeline.clock)
    ratio = costs["b"][0].median_ms / costs["a"][0].median_ms
    assert ratio == pytest.approx(1.05, abs=0.01)


def test_short_passes_are_repeated_and_reported_per_pass() -> None:
    timeline = FakeTimeline()
    costs = measure(
        {"a": timeline.engine("a", lambda _: 0.0001)},
        SHAPES[:1],
        build_batches,
        AMPLE_S,
        timeline.clock,
    )
    assert costs["a"][0].median_ms == pytest.approx(0.1)
    assert len(timeline.passes) > 25 * 30


def test_slow_engine_is_left_out_of_later_rounds() -> None:
    timeline = FakeTimeline()
    engines = {"slow": timeline.per_token("slow", 2.0), "fast": timeline.per_token("fast", 1.0)}
    costs = measure(engines, SHAPES[:1], build_batches, AMPLE_S, timeline.clock)
    assert costs["slow"][0].rounds == 5
    assert costs["fast"][0].rounds == 25
    assert costs["slow"][0].median_ms == pytest.approx(32)


def test_shapes_beyond_the_budget_are_left_out_for_all_engines() -> None:
    timeline = FakeTimeline()
    engines = {"a": timeline.per_token("a", 1.0), "b": timeline.per_token("b", 1.0)}
    budget_s = 12.0  # measuring 8x128 takes 14 s
    costs = measure(engines, SHAPES, build_batches, budget_s, timeline.clock)
    assert list(medians(costs, "a")) == list(medians(costs, "b")) == ["1x16", "4x16", "1x128"]
    assert timeline.clock() - 1_000 <= budget_s


def test_unused_budget_of_a_shape_is_available_to_the_next() -> None:
    timeline = FakeTimeline()
    budget_s = 30.0  # a quarter of it is too little for 8x128
    costs = measure(
        {"a": timeline.per_token("a", 1.0)}, SHAPES, build_batches, budget_s, timeline.clock
    )
    assert "8x128" in medians(costs, "a")
    assert timeline.clock() - 1_000 <= budget_s + 1.1


def test_constant_pass_time_does_not_exclude_large_shapes() -> None:
    timeline = FakeTimeline()
    # As on a GPU, a pass takes 10 ms for every size.
    costs = measure(
        {"a": timeline.engine("a", lambda _: 0.010)}, SHAPES, build_batches, 4.0, timeline.clock
    )
    assert len(costs["a"]) == len(SHAPES)


def test_first_shape_is_measured_with_any_budget() -> None:
    timeline = FakeTimeline()
    costs = measure(
        {"a": timeline.per_token("a", 1.0)}, SHAPES, build_batches, 1e-9, timeline.clock
    )
    assert list(medians(costs, "a")) == ["1x16"]


def test_failing_engine_is_left_out_of_all_shapes() -> None:
    timeline = FakeTimeline()

    def fail_if_large(batch: Batch) -> float:
        if batch.input_ids.size > 100:
            raise EngineFailed("out of memory")
        return 0.001

    engines = {"a": timeline.per_token("a", 0.1), "b": timeline.engine("b", fail_if_large)}
    costs = measure(engines, SHAPES, build_batches, AMPLE_S, timeline.clock)
    assert set(costs) == {"a"}
    assert len(costs["a"]) == len(SHAPES)


def test_no_working_engine_returns_no_costs() -> None:
    def fail(batch: Batch) -> Outputs:
        raise EngineFailed("no")

    assert measure({"a": ScriptedEngine(fail)}, SHAPES, build_batches, AMPLE_S) == {}
    assert measure({}, SHAPES, build_batches, AMPLE_S) == {}


@pytest.mark.parametrize(
    ("device", "threads", "clock"),
    [
        (Device.CPU, 1, time.process_time),
        (Device.CPU, 2, time.perf_counter),  # a pass takes as long as its slowest thread
        (Device.GPU, 1, time.perf_counter),  # the GPU computes while this process waits
    ],
)
def test_clock_is_process_time_only_for_one_cpu_thread(
    device: Device, threads: int, clock: ClockFunction
) -> None:
    assert choose_clock(device, threads) is clock


def test_supported_shapes_end_at_the_model_maximum() -> None:
    assert {str(s) for s in supported_shapes(100)} == {
        f"{items}x{tokens}" for items in (1, 4, 8, 32) for tokens in (16, 64)
    }
    assert supported_shapes(10, items=(4, 1)) == (shape("1x10"), shape("4x10"))
    areas = [s.area for s in supported_shapes(512)]
    assert len(areas) == 20
    assert areas == sorted(areas)


def test_batch_is_deterministic_and_without_padding() -> None:
    batch = build_batch(ITEMS, shape("3x5"))
    assert batch.input_ids.shape == (3, 5)
    assert batch.attention_mask.all()
    assert not batch.token_type_ids.any()
    assert set(batch.input_ids.ravel()) <= {2, 3, 10, 11, 12}
    assert (batch.input_ids[:, 0] == 2).all()
    np.testing.assert_array_equal(batch.input_ids, build_batch(ITEMS, shape("3x5")).input_ids)


@pytest.mark.parametrize(("spins_s", "expected_s"), [(0.0, 0.005), (0.036, 0.045), (9.0, 0.2)])
def test_wait_until_idle_ends_when_no_thread_spins(spins_s: float, expected_s: float) -> None:
    sleeps_s: list[float] = []
    wait_until_idle(lambda: min(sum(sleeps_s), spins_s), sleeps_s.append)
    assert sum(sleeps_s) == pytest.approx(expected_s)
