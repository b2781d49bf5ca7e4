"""The open loop of the load generators."""

from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.fixed_rate import FixedRateSender
from tests.support.fakes import wait_until


async def test_requests_that_end_with_an_exception_are_counted() -> None:
    sent = 0

    async def send() -> None:
        nonlocal sent
        sent += 1
        if sent <= 2:
            raise AttributeError("no such field")

    sender = FixedRateSender()
    sender.start([send], rate=1_000)
    await wait_until(lambda: sent > 4)
    with pytest.raises(BenchmarkError, match=r"2 requests .* 2 with AttributeError"):
        await sender.stop()
