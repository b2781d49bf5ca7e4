"""Bootstrap confidence interval of the gain from reranking."""

from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.training.ranking import bootstrap_gain


def test_equal_gains_leave_no_interval() -> None:
    assert bootstrap_gain(np.full(50, 0.25)) == (0.25, 0.25)


def test_interval_is_that_of_the_mean_and_the_same_in_every_run() -> None:
    gains = np.repeat([0.0, 1.0], 200)
    low, high = bootstrap_gain(gains)
    deviation = 0.5 / np.sqrt(len(gains))
    assert (low, high) == pytest.approx((0.5 - 1.96 * deviation, 0.5 + 1.96 * deviation), abs=0.003)
    assert bootstrap_gain(gains) == (low, high)
