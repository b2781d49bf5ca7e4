from __future__ import annotations

import numpy as np
import pytest

from benchmarks.autoscaling.day import NIGHT_SHARE, DaySettings, draw_day

HOUR = DaySettings(seconds=3_600, models=2, bursts=2)


def test_same_seed_draws_the_same_day() -> None:
    first, again, other = (draw_day(HOUR, seed) for seed in (1, 1, 2))
    assert (first.requests == again.requests).all()
    assert (first.requests != other.requests).any()


def test_work_follows_the_daily_wave() -> None:
    settings = DaySettings(seconds=36_000, models=2, base_work=2.0, bursts=0)
    work = draw_day(settings, 0).work
    assert work[17_900:18_100].mean() == pytest.approx(2.0, rel=0.1)
    assert work[:100].mean() == pytest.approx(2.0 * NIGHT_SHARE, rel=0.2)


def test_bursts_belong_to_single_models() -> None:
    day = draw_day(DaySettings(seconds=3_600, models=2, base_work=0.1, bursts=1, burst_work=8), 3)
    seconds = day.requests * day.request_s[:, np.newaxis] > 1.0  # only bursts exceed one replica
    assert seconds.any(axis=1).all()
    assert (seconds.sum(axis=1) < 1_800).all()
