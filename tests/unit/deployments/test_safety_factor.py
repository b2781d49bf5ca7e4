from __future__ import annotations

import random

import pytest

from deployments.deadlines import deadline_after
from deployments.safety_factor import (
    MAX_FACTOR,
    MAX_LOWER_FACTOR,
    MIN_FACTOR,
    MIN_TIME_SHARE,
    TARGET_SHARE,
    Prediction,
    SafetyFactor,
    build_safety_factors,
)


def end_job(factor: SafetyFactor, *, predicted_s: float, actual_s: float) -> None:
    """Record a job with a deadline 10 s after its arrival."""
    factor.record_end(Prediction(predicted_s, 10.0, deadline_after(10.0 - actual_s)))


def test_factor_covers_the_target_share_of_the_jobs() -> None:
    chance = random.Random(0)
    factor = SafetyFactor()
    in_time = []
    for _ in range(4_000):
        ratio = chance.lognormvariate(0.15, 0.1)
        in_time.append(ratio <= factor.value)
        end_job(factor, predicted_s=5.0, actual_s=5.0 * ratio)
    recent = in_time[1_000:]
    assert sum(recent) / len(recent) == pytest.approx(TARGET_SHARE, abs=0.02)
    assert MIN_FACTOR < factor.value < MAX_FACTOR


@pytest.mark.parametrize(("actual_s", "expected"), [(4.0, MIN_FACTOR), (9.9, MAX_FACTOR)])
def test_factor_is_bounded(actual_s: float, expected: float) -> None:
    factor = SafetyFactor()
    for _ in range(1_000):
        end_job(factor, predicted_s=5.0, actual_s=actual_s)
    assert factor.value == expected


def test_lower_priority_may_need_a_higher_factor_and_can_return() -> None:
    _, lower = build_safety_factors()
    for _ in range(1_000):
        end_job(lower, predicted_s=3.0, actual_s=9.9)
    assert lower.value == MAX_LOWER_FACTOR
    accepted_s = 10.0 / MAX_LOWER_FACTOR  # the longest prediction that admission still accepts
    assert accepted_s > 10.0 * MIN_TIME_SHARE
    end_job(lower, predicted_s=accepted_s, actual_s=1.0)
    assert lower.value < MAX_LOWER_FACTOR


def test_jobs_far_from_their_deadline_teach_nothing() -> None:
    """Jobs that join later can double the time of a short job. That is no overload."""
    factor = SafetyFactor()
    end_job(factor, predicted_s=0.5, actual_s=9.0)
    assert factor.value == MIN_FACTOR


def test_job_that_arrives_after_its_deadline_teaches_nothing() -> None:
    factor = SafetyFactor()
    factor.record_end(Prediction(0.0, -0.1, deadline_after(-0.1)))
    factor.record_abandoned(Prediction(0.0, -0.1, deadline_after(-0.2)))
    assert factor.value == MIN_FACTOR


@pytest.mark.parametrize(("elapsed_s", "is_learned"), [(4.0, False), (9.9, True)])
def test_abandoned_job_teaches_only_if_it_is_late(elapsed_s: float, is_learned: bool) -> None:
    factor = SafetyFactor()
    factor.record_abandoned(Prediction(5.0, 10.0, deadline_after(10.0 - elapsed_s)))
    assert (factor.value > MIN_FACTOR) == is_learned
