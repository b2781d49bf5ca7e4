from __future__ import annotations

import pytest

from deployments.load import BusyMeter, Load, WorkRate
from tests.support.fakes import FakeClock


def test_busy_share_is_the_mean_between_reports() -> None:
    clock = FakeClock()
    meter = BusyMeter(2, clock)
    meter.start()
    clock.now_s += 1.0
    meter.start()
    clock.now_s += 1.0
    meter.end()
    meter.end()
    clock.now_s += 2.0
    assert meter.take() == pytest.approx((0.5 + 1.0) / 4)
    clock.now_s += 1.0
    assert meter.take() == 0.0


def test_call_that_runs_across_reports_counts_in_both() -> None:
    clock = FakeClock()
    meter = BusyMeter(1, clock)
    clock.now_s += 1.0
    with meter.running():
        clock.now_s += 1.0
        assert meter.take() == pytest.approx(0.5)
        clock.now_s += 3.0
        assert meter.take() == pytest.approx(1.0)
    clock.now_s += 1.0
    assert meter.take() == 0.0


def test_calls_above_the_capacity_count_as_full() -> None:
    clock = FakeClock()
    meter = BusyMeter(1, clock)
    with meter.running(), meter.running():
        clock.now_s += 1.0
    clock.now_s += 1.0
    assert meter.take() == pytest.approx(0.5)
    assert meter.take() == 0.0, "no time has passed"


def test_rate_is_measured_and_follows_changes() -> None:
    rate = WorkRate()
    assert rate.predict_s(100) == 0.0
    rate.record(1000, 2.0)
    assert rate.predict_s(100) == pytest.approx(0.2)
    for _ in range(200):
        rate.record(1000, 4.0)
    assert rate.predict_s(100) == pytest.approx(0.4, rel=1e-3)


def test_large_work_weighs_more_than_small() -> None:
    rate = WorkRate()
    rate.record(1, 1.0)
    rate.record(999, 9.0)
    assert rate.predict_s(1000) == pytest.approx(10.0, rel=0.01)


def test_metrics_have_the_names_that_the_policy_reads() -> None:
    assert Load(0.5, 2.0).to_metrics() == {"busy": 0.5, "queued_s": 2.0}
