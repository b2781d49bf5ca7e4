from __future__ import annotations

import asyncio

import pytest

from benchmarks.common.closed_loop import run_clients


async def test_each_client_sends_one_request_at_a_time() -> None:
    sent: list[int] = []
    pending = most_pending = 0

    async def send(number: int) -> None:
        nonlocal pending, most_pending
        sent.append(number)
        pending += 1
        most_pending = max(most_pending, pending)
        await asyncio.sleep(0)
        pending -= 1

    await run_clients(3, range(10), send)
    assert sent == list(range(10))
    assert most_pending == 3


async def test_failed_request_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def send(number: int) -> None:
        if number == 2:
            raise ValueError("no answer")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    with pytest.raises(ValueError, match="no answer"):
        await run_clients(3, range(10), send)
    assert cancelled == [0, 1]
