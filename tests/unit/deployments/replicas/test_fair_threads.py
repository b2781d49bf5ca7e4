"""Threads that take queued calls in fair order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from deployments.errors import Overloaded
from deployments.fair_queue import FairQueue
from deployments.replicas.fair_threads import FairThreads
from tests.support.fakes import TIMEOUT_S, wait_until


async def test_thread_of_cancelled_work_stays_busy_until_the_work_ends() -> None:
    """Otherwise queued work would enter the executor, where priorities no longer count."""
    threads = FairThreads("test")
    begun, held = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        begun.set()
        held.wait(TIMEOUT_S)

    gone = asyncio.create_task(threads.run(hold, cost=1.0))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
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
    await threads.close()


async def test_callers_that_leave_together_cost_one_search_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of the queue for each of them would stall the replica for minutes."""
    searches: list[int] = []
    discard = FairQueue.discard

    def counting(queue: FairQueue[object], is_unwanted: Callable[[object], bool]) -> list[object]:
        removed = discard(queue, is_unwanted)
        searches.append(len(removed))
        return removed

    monkeypatch.setattr(FairQueue, "discard", counting)
    threads = FairThreads("test")
    held = threading.Event()
    running = asyncio.create_task(threads.run(lambda: held.wait(TIMEOUT_S), cost=1.0))
    leaving = [asyncio.create_task(threads.run(lambda: None, cost=1.0)) for _ in range(200)]
    staying = asyncio.create_task(threads.run(lambda: "done", cost=1.0))
    await asyncio.sleep(0)
    for caller in leaving:
        caller.cancel()
    await wait_until(lambda: bool(searches))
    assert searches == [200]
    held.set()
    assert (await running, await staying) == (True, "done")
    await threads.close()


async def test_closing_refuses_waiting_and_new_work_and_awaits_running_work() -> None:
    """The event loop goes on meanwhile, so that the running work can be delivered."""
    threads = FairThreads("test")
    begun, held = threading.Event(), threading.Event()

    def hold() -> str:
        begun.set()
        held.wait(TIMEOUT_S)
        return "done"

    running = asyncio.create_task(threads.run(hold, cost=1.0))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    waiting = asyncio.create_task(threads.run(lambda: "never", cost=1.0))
    await asyncio.sleep(0)
    closing = asyncio.create_task(threads.close())
    with pytest.raises(Overloaded, match="stopping"):
        await asyncio.wait_for(waiting, TIMEOUT_S)
    with pytest.raises(Overloaded, match="stopping"):
        await threads.run(lambda: "never", cost=1.0)
    assert not closing.done()
    held.set()
    assert await asyncio.wait_for(running, TIMEOUT_S) == "done"
    await asyncio.wait_for(closing, TIMEOUT_S)


async def test_work_that_has_just_got_a_thread_is_refused_too() -> None:
    threads = FairThreads("test")
    held = threading.Event()
    running = asyncio.create_task(threads.run(lambda: held.wait(TIMEOUT_S), cost=1.0))
    waiting = asyncio.create_task(threads.run(lambda: "never", cost=1.0))
    await asyncio.sleep(0)
    threads._end()  # as if `running` had ended: `waiting` has its turn, and resumes later
    held.set()
    await threads.close()
    with pytest.raises(Overloaded, match="stopping"):
        await waiting
    assert await running
