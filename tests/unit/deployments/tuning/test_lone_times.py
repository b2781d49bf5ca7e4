"""Lone passes learn from their own times which session is faster."""

from __future__ import annotations

import pytest

from deployments.tuning.costs import Cost, Shape
from deployments.tuning.lone_times import TRIAL_INTERVAL, LonePassTimes, ShapeTimes
from tests.support.cost_tables import row

TOKENS = 64
# Milliseconds of a pass of TOKENS tokens with one thread and with all cores.
Speeds = tuple[float, float]


def costs(medians_ms: dict[str, float]) -> dict[Shape, Cost]:
    return {cost.shape: cost for cost in row("plain", medians_ms).costs}


def read_times(one_thread_ms: float, all_cores_ms: float | None) -> ShapeTimes:
    """Return the times near the only shape of tables that state these milliseconds."""
    shape = f"1x{TOKENS}"
    all_cores = {} if all_cores_ms is None else costs({shape: all_cores_ms})
    return LonePassTimes(costs({shape: one_thread_ms}), all_cores).at(1, TOKENS)


def run_pass(times: ShapeTimes, speeds: Speeds, tokens: int = TOKENS) -> bool:
    """Run a lone pass. Return whether it used all cores."""
    session = times.choose()
    uses_all_cores = session is times.all_cores
    session.record(tokens, speeds[uses_all_cores] / 1e3 * tokens / TOKENS)
    return uses_all_cores


def run_passes(times: ShapeTimes, speeds: Speeds, count: int) -> list[bool]:
    return [run_pass(times, speeds) for _ in range(count)]


def prefers_all_cores(times: ShapeTimes, speeds: Speeds) -> bool:
    """Return what the next passes use, but for one trial."""
    choices = run_passes(times, speeds, TRIAL_INTERVAL)
    assert sum(choices) in (0, 1, TRIAL_INTERVAL - 1, TRIAL_INTERVAL), "the choice is settled"
    return sum(choices) > 1


@pytest.mark.parametrize(
    ("tables", "speeds", "passes"),
    [
        pytest.param((2.7, 3.35), (2.7, 1.8), TRIAL_INTERVAL, id="all cores 24 % slower"),
        pytest.param((2.7, 4.0), (2.7, 1.8), TRIAL_INTERVAL, id="all cores 48 % slower"),
        pytest.param((5.4, 185.9), (5.4, 4.0), 2 * TRIAL_INTERVAL, id="all cores beside a crowd"),
        pytest.param((2.7, 1.8), (2.7, 4.0), 5, id="all cores too fast"),
        pytest.param((2.7, 1.8), (1.0, 1.8), 2 * TRIAL_INTERVAL, id="one thread too slow"),
        pytest.param((2.0, 3.0), (6.0, 4.0), 15, id="one thread too fast"),
    ],
)
def test_wrong_table_is_corrected_within_so_many_passes(
    tables: Speeds, speeds: Speeds, passes: int
) -> None:
    times = read_times(*tables)
    assert run_pass(times, speeds) is (tables[1] < tables[0]), "the table decides at first"
    run_passes(times, speeds, passes - 1)
    assert prefers_all_cores(times, speeds) is (speeds[1] < speeds[0])


def test_tie_of_the_tables_is_settled_by_the_first_passes() -> None:
    times, speeds = read_times(2.7, 2.9), (2.7, 2.9)
    assert run_pass(times, speeds), "all cores come first"
    run_passes(times, speeds, 2)
    assert not prefers_all_cores(times, speeds)


def test_machine_that_changes_is_followed() -> None:
    """Two virtual cores share a physical one for a while, again and again."""
    times = read_times(2.7, 1.8)
    apart, shared = (2.7, 1.8), (2.7, 3.3)
    for _ in range(3):
        run_passes(times, apart, 6 * TRIAL_INTERVAL)
        assert prefers_all_cores(times, apart)
        run_passes(times, shared, 12)
        assert not prefers_all_cores(times, shared)


@pytest.mark.parametrize("speeds", [(2.7, 1.8), (1.8, 2.7)])
def test_one_pass_of_each_interval_tries_the_slower_session(speeds: Speeds) -> None:
    times = read_times(*speeds)
    choices = run_passes(times, speeds, 3 * TRIAL_INTERVAL)
    is_faster = speeds[1] < speeds[0]
    trials = [number for number, choice in enumerate(choices, 1) if choice is not is_faster]
    assert trials == [TRIAL_INTERVAL, 2 * TRIAL_INTERVAL, 3 * TRIAL_INTERVAL]


def test_far_slower_session_is_tried_more_rarely() -> None:
    """On a host with many cores, a pass of one thread takes many times as long."""
    speeds = (10.0, 1.0)
    times = read_times(*speeds)
    passes = 50 * TRIAL_INTERVAL
    trials = run_passes(times, speeds, passes).count(False)
    assert 0 < trials * (speeds[0] - speeds[1]) <= passes * speeds[1] / TRIAL_INTERVAL


def test_trials_meet_all_texts_of_a_client_that_repeats_some() -> None:
    """A short text takes more time per token: it must not speak for one session alone."""
    texts: list[tuple[int, Speeds]] = [(80, (1.6, 1.4)), (48, (2.4, 2.2))] * 16
    times = read_times(1.9, 2.2)
    for tokens, speeds in texts * 20:
        run_pass(times, speeds, tokens)
    choices = [run_pass(times, speeds, tokens) for tokens, speeds in texts]
    assert sum(choices) >= len(texts) - 2


@pytest.mark.parametrize("passes_before", [0, 5, 100])
@pytest.mark.parametrize("speeds", [(2.7, 1.8), (1.8, 2.7)])
def test_one_stall_does_not_change_the_choice(speeds: Speeds, passes_before: int) -> None:
    times = read_times(*speeds)
    run_passes(times, speeds, passes_before)
    run_pass(times, (1_000.0, 1_000.0))
    assert prefers_all_cores(times, speeds) is (speeds[1] < speeds[0])


def test_all_cores_are_never_tried_if_unmeasured() -> None:
    times = read_times(1.0, None)
    assert not any(run_passes(times, (100.0, 1.0), 10 * TRIAL_INTERVAL))


def test_predictions_are_for_the_actual_size() -> None:
    session = read_times(4.0, None).usual
    assert session.predict_s(TOKENS // 2) == pytest.approx(0.002)
    for _ in range(50):
        session.record(TOKENS // 2, 0.003)
    assert session.predict_s(TOKENS) == pytest.approx(0.006, rel=0.02)
