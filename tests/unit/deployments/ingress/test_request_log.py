from __future__ import annotations

import pytest

from deployments.errors import RateLimited
from deployments.ingress.request_log import MAX_LINES_PER_S, LineLimit, record_rejection
from deployments.keys.caller import Caller, set_current_caller
from deployments.keys.key import KeyLimits
from deployments.keys.limits import KeyMeter
from tests.support.fakes import FakeClock, ListRecorder


async def test_refusals_leave_the_tokens_that_running_requests_reserve() -> None:
    clock = FakeClock()
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=600), clock)
    set_current_caller(Caller("alice", meter=meter))
    lease = meter.enter(1)
    meter.use_tokens(40)
    lease.release()
    clock.now_s += 60
    for _ in range(50):
        record_rejection(ListRecorder(), RateLimited("one at a time"), 0.0)
    meter.enter(1)
    meter.enter(1)
    with pytest.raises(RateLimited, match="600 tokens"):
        meter.enter(1)


def test_flood_of_failures_has_few_lines_and_tells_how_many_are_omitted() -> None:
    clock = FakeClock()
    lines = LineLimit(clock)
    written = [lines.take() for _ in range(MAX_LINES_PER_S + 7)]
    assert written == [0] * MAX_LINES_PER_S + [None] * 7
    clock.now_s += 1
    assert [lines.take(), lines.take()] == [7, 0]
