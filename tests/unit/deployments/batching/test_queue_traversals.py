"""How often the scheduler traverses its queue on the event loop."""

from __future__ import annotations

import asyncio

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import DeadlineExceeded, Overloaded
from tests.support.fakes import TIMEOUT_S, FakeEngine, far_deadline, item, wait_until
from tests.unit.deployments.batching.conftest import MODEL, MakeScheduler


async def test_queue_is_cleaned_once_per_interval(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    cleaned = []
    discard = scheduler._queue.discard
    monkeypatch.setattr(
        scheduler._queue, "discard", lambda unwanted: cleaned.append(1) or discard(unwanted)
    )
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = [scheduler.submit(MODEL, [item(2)], far_deadline()) for _ in range(6)]
    monkeypatch.setattr("deployments.queue_cleaner.CLEAN_INTERVAL_S", TIMEOUT_S)
    monkeypatch.setattr(scheduler._cleaner, "_cleaned_s", -TIMEOUT_S)
    for call in waiting[:3]:
        call.cancel()
        scheduler.clean()
        await wait_until(lambda: bool(cleaned))  # the first clean is due at once
        await asyncio.sleep(0.01)  # the others would be due now
    assert (len(cleaned), scheduler.waiting_items) == (1, 5)
    engine.release()
    await running
    await waiting[-1]
    assert engine.passes[1:] == [[2] * 3], "no pass computes cancelled calls"


async def test_cancelled_items_that_still_wait_do_not_fill_the_queue(
    make_scheduler: MakeScheduler,
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine, max_waiting_items=4)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    gone = scheduler.submit(MODEL, [item(2)] * 4, far_deadline(), client="a")
    gone.cancel()
    scheduler.clean()
    waiting = scheduler.submit(MODEL, [item(3)] * 3, far_deadline(), client="a")
    assert scheduler.waiting_items == 3
    engine.release()
    await running
    await waiting


async def test_late_calls_of_a_pass_leave_the_queue_in_one_traversal(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    late = [scheduler.submit(MODEL, [item(2)] * 3, deadline_after(-1)) for _ in range(2)]
    traversals = []
    discard = scheduler._queue.discard
    monkeypatch.setattr(
        scheduler._queue, "discard", lambda unwanted: traversals.append(1) or discard(unwanted)
    )
    engine.release()
    await running
    outcomes = await asyncio.gather(*late, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 2
    assert (len(traversals), scheduler.waiting_items, len(engine.passes)) == (1, 0, 1)


async def test_displaced_calls_leave_the_queue_in_one_traversal(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine, max_waiting_items=8)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    loud = [scheduler.submit(MODEL, [item(2)], far_deadline(), client="loud") for _ in range(8)]
    traversals = []
    discard = scheduler._queue.discard
    monkeypatch.setattr(
        scheduler._queue, "discard", lambda unwanted: traversals.append(1) or discard(unwanted)
    )
    quiet = scheduler.submit(MODEL, [item(3)] * 3, far_deadline(), client="quiet")
    assert (len(traversals), scheduler.waiting_items) == (1, 8)
    engine.release()
    await asyncio.gather(running, quiet)
    outcomes = await asyncio.gather(*loud, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(Overloaded) == 3
