from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from deployments.artifacts.types import Device
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs
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


def batch_of(where: Shape) -> tuple[Batch, ...]:
    return (build_batch(ITEMS, where),)


class FakeTimeline:
    """Engines that take, on a clock of ours, as long as they are told to."""

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
        """An engine that takes `ms` per padded token."""
        return self.engine(name, lambda batch: ms / 1e3 * batch.input_ids.size)


def medians(costs: dict, name: str) -> dict[str, float]:
    return {str(cost.shape): round(cost.median_ms, 3) for cost in costs[name]}


def test_every_engine_is_measured_at_every_shape() -> None:
    track = FakeTimeline()
    engines = {"a": track.per_token("a", 1.0), "b": track.per_token("b", 1.1)}
    costs = measure(engines, SHAPES, batch_of, AMPLE_S, track.clock)
    assert medians(costs, "a") == {"1x16": 16, "4x16": 64, "1x128": 128, "8x128": 1024}
    assert medians(costs, "b") == pytest.approx(
        {"1x16": 17.6, "4x16": 70.4, "1x128": 140.8, "8x128": 1126.4}
    )
    assert all(cost.rounds == 25 and cost.low_ms > 0 for cost in costs["a"])


def test_rounds_are_interleaved_and_another_one_goes_first_each_time() -> None:
    track = FakeTimeline()
    engines = {name: track.per_token(name, 1.0) for name in "abc"}
    measure(engines, SHAPES[:1], batch_of, AMPLE_S, track.clock)
    warm, rounds = track.passes[:6], "".join(track.passes[6:])
    assert sorted(warm) == sorted("aabbcc")
    assert rounds.startswith("aabbccbbccaaccaabb")


def test_a_machine_that_slows_down_changes_no_order() -> None:
    track = FakeTimeline()
    started_s = track.clock()

    def slowing(factor: float) -> Callable[[Batch], float]:
        return lambda _: factor * (0.010 + 0.001 * (track.clock() - started_s))

    engines = {"a": track.engine("a", slowing(1.0)), "b": track.engine("b", slowing(1.05))}
    costs = measure(engines, SHAPES[:1], batch_of, AMPLE_S, track.clock)
    ratio = costs["b"][0].median_ms / costs["a"][0].median_ms
    assert ratio == pytest.approx(1.05, abs=0.01)


def test_short_passes_are_repeated_and_told_per_pass() -> None:
    track = FakeTimeline()
    costs = measure(
        {"a": track.engine("a", lambda _: 0.0001)}, SHAPES[:1], batch_of, AMPLE_S, track.clock
    )
    assert costs["a"][0].median_ms == pytest.approx(0.1)
    assert len(track.passes) > 25 * 30


def test_who_is_far_behind_is_spared_the_later_rounds() -> None:
    track = FakeTimeline()
    engines = {"slow": track.per_token("slow", 2.0), "fast": track.per_token("fast", 1.0)}
    costs = measure(engines, SHAPES[:1], batch_of, AMPLE_S, track.clock)
    assert costs["slow"][0].rounds == 5
    assert costs["fast"][0].rounds == 25
    assert costs["slow"][0].median_ms == pytest.approx(32)


def test_shapes_beyond_the_budget_are_left_out_for_everybody() -> None:
    track = FakeTimeline()
    engines = {"a": track.per_token("a", 1.0), "b": track.per_token("b", 1.0)}
    budget_s = 12.0  # 8x128 alone needs more than 14 s
    costs = measure(engines, SHAPES, batch_of, budget_s, track.clock)
    assert list(medians(costs, "a")) == list(medians(costs, "b")) == ["1x16", "4x16", "1x128"]
    assert track.clock() - 1_000 <= budget_s


def test_what_a_shape_leaves_of_its_share_is_there_for_the_next() -> None:
    track = FakeTimeline()
    budget_s = 30.0  # a fourth of it would not do for 8x128
    costs = measure({"a": track.per_token("a", 1.0)}, SHAPES, batch_of, budget_s, track.clock)
    assert "8x128" in medians(costs, "a")
    assert track.clock() - 1_000 <= budget_s + 1.1


def test_a_guess_by_a_small_shape_does_not_rule_out_a_large_one() -> None:
    track = FakeTimeline()
    # As on a GPU: whatever the size, a pass takes 10 ms.
    costs = measure({"a": track.engine("a", lambda _: 0.010)}, SHAPES, batch_of, 4.0, track.clock)
    assert len(costs["a"]) == len(SHAPES)


def test_the_first_shape_is_measured_whatever_the_budget() -> None:
    track = FakeTimeline()
    costs = measure({"a": track.per_token("a", 1.0)}, SHAPES, batch_of, 1e-9, track.clock)
    assert list(medians(costs, "a")) == ["1x16"]


def test_an_engine_that_fails_is_left_out_altogether() -> None:
    track = FakeTimeline()

    def too_large(batch: Batch) -> float:
        if batch.input_ids.size > 100:
            raise EngineFailed("out of memory")
        return 0.001

    engines = {"a": track.per_token("a", 0.1), "b": track.engine("b", too_large)}
    costs = measure(engines, SHAPES, batch_of, AMPLE_S, track.clock)
    assert set(costs) == {"a"}
    assert len(costs["a"]) == len(SHAPES)


def test_when_all_fail_nothing_was_measured() -> None:
    def fail(batch: Batch) -> Outputs:
        raise EngineFailed("no")

    assert measure({"a": ScriptedEngine(fail)}, SHAPES, batch_of, AMPLE_S) == {}
    assert measure({}, SHAPES, batch_of, AMPLE_S) == {}


@pytest.mark.parametrize(
    ("device", "threads", "clock"),
    [
        (Device.CPU, 1, time.process_time),
        (Device.CPU, 2, time.perf_counter),  # whose passes are as long as their longest thread
        (Device.GPU, 1, time.perf_counter),  # which computes while this process waits
    ],
)
def test_a_thread_that_has_to_wait_for_its_core_is_not_slower(
    device: Device, threads: int, clock: ClockFunction
) -> None:
    assert choose_clock(device, threads) is clock


def test_usual_shapes_stop_at_what_the_model_reads() -> None:
    assert {str(s) for s in supported_shapes(100)} == {
        f"{items}x{tokens}" for items in (1, 4, 8, 32) for tokens in (16, 64)
    }
    assert supported_shapes(10, items=(4, 1)) == (shape("1x10"), shape("4x10"))
    areas = [s.area for s in supported_shapes(512)]
    assert len(areas) == 20
    assert areas == sorted(areas)


def test_a_batch_is_full_of_real_tokens_and_the_same_each_time() -> None:
    batch = build_batch(ITEMS, shape("3x5"))
    assert batch.input_ids.shape == (3, 5)
    assert batch.attention_mask.all()
    assert not batch.token_type_ids.any()
    assert set(batch.input_ids.ravel()) <= {2, 3, 10, 11, 12}
    assert (batch.input_ids[:, 0] == 2).all()
    np.testing.assert_array_equal(batch.input_ids, build_batch(ITEMS, shape("3x5")).input_ids)


@pytest.mark.parametrize(("spins_s", "waited_s"), [(0.0, 0.005), (0.036, 0.045), (9.0, 0.2)])
def test_rest_comes_when_no_thread_spins_any_more(spins_s: float, waited_s: float) -> None:
    slept: list[float] = []
    wait_until_idle(lambda: min(sum(slept), spins_s), slept.append)
    assert sum(slept) == pytest.approx(waited_s)
