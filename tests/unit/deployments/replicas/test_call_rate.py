from __future__ import annotations

import pytest

from deployments.replicas.call_rate import CallRate


def test_rate_is_that_of_the_last_minute() -> None:
    rate = CallRate(0.0)
    assert rate.per_minute(10.0) == 0
    rate.add(32, 10.0)
    rate.add(8, 30.0)
    assert rate.per_minute(59.0) == 40
    assert rate.per_minute(90.0) == 20
    rate.add(5, 90.0)
    assert rate.per_minute(90.0) == 25
    assert rate.per_minute(125.0) == pytest.approx(5 * 55 / 60)
    assert rate.per_minute(10_000.0) == 0
