from __future__ import annotations

from deployments.rate_limit import RateLimit
from tests.support.fakes import FakeClock


def test_events_beyond_the_limit_are_omitted_and_counted() -> None:
    clock = FakeClock()
    limit = RateLimit(20, clock)
    assert [limit.take() for _ in range(27)] == [0] * 20 + [None] * 7
    clock.now_s += 1
    assert [limit.take(), limit.take()] == [7, 0]
