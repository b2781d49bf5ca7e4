"""Threads that take queued calls in fair order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.replicas.fair_threads import FairThreads


async def test_thread_of_cancelled_work_stays_busy_until_the_work_ends() -> None:
    """Otherwise queued work would enter the executor, where priorities no longer count."""
    threads = FairThreads("test")
    begun, held = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        begun.set()
        held.wait(10)

    gone = asyncio.create_task(threads.run(hold, cost=1.0))
    await asyncio.to_thread(begun.wait, 10)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    later = asyncio.create_task(threads.run(lambda: order.append("batch"), cost=1.0, priority=1))
    await asyncio.sleep(0.01)
    first = asyncio.create_task(threads.run(lambda: order.append("interactive"), cost=1.0))
    await asyncio.sleep(0.01)
    held.set()
    await asyncio.gather(later, first)
    assert order == ["interactive", "batch"]
    threads.close()
