"""The open loop of the load generators."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.fixed_rate import FixedRateSender, SendRequest
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


async def test_lost_results_do_not_replace_an_earlier_error() -> None:
    sent = 0

    async def send() -> None:
        nonlocal sent
        sent += 1
        raise AttributeError("no such field")

    async def measure() -> None:
        try:
            await wait_until(lambda: sent > 1)
            raise ValueError("the server has ended")
        finally:
            await sender.stop()

    sender = FixedRateSender()
    sender.start([send], rate=1_000)
    with pytest.raises(ValueError, match="the server has ended"):
        await measure()


async def test_sender_that_ends_with_an_exception_is_counted() -> None:
    def build(name: str) -> SendRequest:
        raise OSError(name)

    sender = FixedRateSender()
    sender.start(map(build, ["a request"]), rate=1_000)
    await asyncio.sleep(0)
    with pytest.raises(BenchmarkError, match="1 with OSError"):
        await sender.stop()
