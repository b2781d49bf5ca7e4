"""The batch scheduler accepts, orders, rejects and drops calls by predicted time and client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from deployments.batching.prices import MEASURED_PASSES
from deployments.config import BatchSettings
from deployments.deadlines import deadline_after
from deployments.errors import DeadlineExceeded, Overloaded
from deployments.safety_factor import LATE_STEP, MIN_FACTOR, TARGET_SHARE
from tests.support.batch_schedulers import DEFAULT_HOOKS, build_batch_scheduler
from tests.support.fakes import FakeClock, FakeEngine, ListRecorder, far_deadline, item, wait_until
from tests.unit.deployments.batching.conftest import MODEL, OTHER


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Only the test lets time pass: for deadlines, in passes and since the calls of a client."""
    clock = FakeClock()
    monkeypatch.setattr("deployments.deadlines.time", SimpleNamespace(monotonic=clock))
    for module in ("passes", "scheduler"):
        frozen = SimpleNamespace(perf_counter=clock)
        monkeypatch.setattr(f"deployments.batching.{module}.time", frozen)
    return clock


class Busy:
    """A scheduler whose engine is held in its first pass. An item is predicted to take `item_s`."""

    def __init__(self, item_s: float = 1.0, **settings: int) -> None:
        self.engine = FakeEngine(held=True)
        self.scheduler = build_batch_scheduler(
            {MODEL: self.engine, OTHER: self.engine},
            BatchSettings(
                **{"max_batch_items": 4, "prefetch_from_items": 2_000, **settings},
                pass_overhead_tokens=1_000,
            ),
            concurrent_passes=1,
            recorder=ListRecorder(),
            hooks=DEFAULT_HOOKS._replace(estimate_item=lambda _model, _tokens: item_s),
        )
        self.submit = self.scheduler.submit

    async def __aenter__(self) -> Busy:
        self.first = self.submit(MODEL, [item(0)], far_deadline())
        await wait_until(lambda: bool(self.engine.passes))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.release()
        await self.first
        await self.scheduler.drain()

    @property
    def later_passes(self) -> list[list[int]]:
        return self.engine.passes[1:]


async def test_idle_scheduler_accepts_what_a_wrong_price_calls_too_long() -> None:
    async with Busy(item_s=1e6) as busy:
        accepted = busy.submit(MODEL, [item(1)], deadline_after(10.0))
        busy.engine.release()
        assert (await accepted).rows == [[1]]


async def test_call_whose_predicted_end_is_after_its_deadline_is_refused_at_once() -> None:
    async with Busy() as busy:
        waiting = busy.submit(MODEL, [item(n) for n in range(20)], far_deadline())
        with pytest.raises(Overloaded, match=r"would take about 26\.4 s") as refused:
            busy.submit(MODEL, [item(99)], deadline_after(15.0))
        assert refused.value.retry_after_s == pytest.approx(MIN_FACTOR * 22 - 15, abs=0.5)
        assert refused.value.needed_s == pytest.approx(MIN_FACTOR * 22)
        accepted = busy.submit(MODEL, [item(98)], deadline_after(30.0))
        busy.engine.release()
        await asyncio.gather(waiting, accepted)


async def test_pass_that_runs_counts_as_work_before_a_call() -> None:
    async with Busy() as busy:
        waiting = busy.submit(MODEL, [item(n) for n in range(20)], far_deadline())
        with pytest.raises(Overloaded):  # 22 items with the running pass
            busy.submit(MODEL, [item(99)], deadline_after(MIN_FACTOR * 21.5))
        busy.engine.release()
        await waiting


async def test_pass_that_ended_does_not_count_as_work_before_a_call() -> None:
    async with Busy() as busy:
        busy.engine.release()
        await busy.first
        busy.scheduler.prices.record(MODEL, 1e6, 1e6)  # an item takes 1 s, as before
        busy.engine.hold()
        running = busy.submit(MODEL, [item(1)], far_deadline())
        await wait_until(lambda: bool(busy.later_passes))
        waiting = busy.submit(MODEL, [item(2)], far_deadline())
        with pytest.raises(Overloaded) as refused:
            busy.submit(MODEL, [item(3)], deadline_after(3.0))
        assert refused.value.needed_s == pytest.approx(MIN_FACTOR * 3, rel=0.01)
        busy.engine.release()
        await asyncio.gather(running, waiting)


@pytest.mark.parametrize("items", [1, 40])
async def test_late_call_raises_the_factor_of_later_predictions_once(
    items: int, clock: FakeClock
) -> None:
    async with Busy(item_s=0.5 / items) as busy:
        waiting = busy.submit(MODEL, [item(0)], far_deadline())
        predicted_s = 0.5 / items * (2 + items)
        timeout_s = 1.05 * MIN_FACTOR * predicted_s
        late = busy.submit(MODEL, [item(n) for n in range(items)], deadline_after(timeout_s))
        clock.now_s += timeout_s + 0.01
        late.cancel()  # the ingress cancels a call at its deadline
        busy.scheduler.clean()
        await wait_until(lambda: busy.scheduler.waiting_items == 1)
        with pytest.raises(Overloaded) as refused:
            busy.submit(MODEL, [item(99)], deadline_after(0.001))
        factor = MIN_FACTOR * (1 + LATE_STEP * TARGET_SHARE)
        assert refused.value.needed_s == pytest.approx(factor * 0.5 / items * 3)
        busy.engine.release()
        await waiting


async def test_late_batch_call_does_not_tighten_admission_of_interactive_calls(
    clock: FakeClock,
) -> None:
    async with Busy(item_s=0.25) as busy:
        waiting = busy.submit(MODEL, [item(0)], far_deadline())
        timeout_s = 1.05 * MIN_FACTOR * 0.75  # a running, a waiting and its own item
        late = busy.submit(MODEL, [item(1)], deadline_after(timeout_s), priority=1)
        clock.now_s += timeout_s + 0.01
        late.cancel()
        busy.scheduler.clean()
        await wait_until(lambda: busy.scheduler.waiting_items == 1)
        factors = []
        for priority in (0, 1):
            with pytest.raises(Overloaded) as refused:
                busy.submit(MODEL, [item(9)], deadline_after(0.001), priority=priority)
            assert refused.value.needed_s is not None
            factors.append(refused.value.needed_s / 0.75)
        assert factors == pytest.approx([MIN_FACTOR, MIN_FACTOR * (1 + LATE_STEP * TARGET_SHARE)])
        busy.engine.release()
        await waiting


async def test_quiet_client_is_accepted_beside_the_long_queue_of_another() -> None:
    async with Busy() as busy:
        loud = busy.submit(MODEL, [item(n) for n in range(20)], far_deadline(), client="loud")
        quiet = busy.submit(MODEL, [item(99)], deadline_after(5.0), client="quiet")
        busy.engine.release()
        assert (await quiet).rows == [[99]]
        await loud
    assert any(99 in markers for markers in busy.later_passes[:2])


async def test_sentence_of_any_model_waits_for_one_pass_of_a_call_of_1024_texts() -> None:
    async with Busy() as busy:
        texts = [item(n, 9) for n in range(1_024)]
        big = busy.submit(MODEL, texts, deadline_after(9e9), client="a")
        same_model = busy.submit(MODEL, [item(2_000, 9)], far_deadline(), client="b")
        other_model = busy.submit(OTHER, [item(3_000)], far_deadline(), client="c")
        busy.engine.release()
        await asyncio.gather(same_model, other_model)
        before_big_ends = [n for batch in busy.later_passes[:3] for n in batch]
        await big
    assert {2_000, 3_000} <= set(before_big_ends)


async def test_client_with_ten_times_the_load_gets_its_share() -> None:
    async with Busy(item_s=0.5, max_batch_items=1) as busy:
        calls = [
            busy.submit(MODEL, [item(100 * loud + n)], far_deadline(), client=f"client {loud}")
            for loud, texts in ((1, 50), (0, 5))
            for n in range(texts)
        ]
        busy.engine.release()
        await asyncio.gather(*calls)
    served = [batch[0] for batch in busy.later_passes]
    assert all(sum(n < 100 for n in served[: 2 * k + 1]) >= k for k in range(1, 6))


async def test_interactive_calls_go_before_batch_calls_which_do_not_starve() -> None:
    async with Busy(max_batch_items=1) as busy:
        batch = [busy.submit(MODEL, [item(n)], far_deadline(), priority=1) for n in (1, 2)]
        calls = [busy.submit(MODEL, [item(100 + n)], far_deadline()) for n in range(40)]
        busy.engine.release()
        await asyncio.gather(*batch, *calls)
    turns = [index for index, markers in enumerate(busy.later_passes) if markers[0] < 100]
    assert turns == [16, 33]


async def test_call_that_cannot_end_any_more_is_dropped_before_its_pass() -> None:
    """The call is accepted, but measured passes then show that it cannot end by its deadline.

    A real case was a question over 911,000 tokens, with 46 s of work.
    """
    async with Busy() as busy:
        big = busy.submit(MODEL, [item(n) for n in range(100)], deadline_after(30.0))
        small = busy.submit(MODEL, [item(500)], far_deadline(), client="other")
        for _ in range(MEASURED_PASSES):
            busy.scheduler.prices.record(MODEL, 1.0, 1.0)
        busy.engine.release()
        with pytest.raises(DeadlineExceeded, match="Send fewer or shorter texts"):
            await big
        await small
    assert busy.later_passes == [[500]]


async def test_call_is_not_dropped_for_the_items_that_it_has_computed() -> None:
    busy = Busy(max_batch_items=9)
    call = busy.submit(MODEL, [item(n) for n in range(10)], deadline_after(30.0))
    await wait_until(lambda: bool(busy.engine.passes))  # of 9 items; the last one waits
    for _ in range(MEASURED_PASSES):
        busy.scheduler.prices.record(MODEL, 1.0, 10.0)  # 10 s per item
    busy.engine.release()
    assert len((await call).rows) == 10
    await busy.scheduler.drain()


async def test_full_queue_rejects_the_call_whose_turn_is_last() -> None:
    async with Busy(max_waiting_items=4) as busy:
        loud = [
            busy.submit(MODEL, [item(n), item(n)], far_deadline(), client="loud") for n in (1, 2)
        ]
        with pytest.raises(Overloaded, match="queue is full"):
            busy.submit(MODEL, [item(3)], far_deadline(), client="loud")
        quiet = busy.submit(MODEL, [item(4)], far_deadline(), client="quiet")
        busy.engine.release()
        with pytest.raises(Overloaded, match="queue is full"):
            await loud[1]
        await asyncio.gather(loud[0], quiet)


async def test_call_that_does_not_fit_displaces_no_other() -> None:
    async with Busy(max_waiting_items=10) as busy:
        urgent = busy.submit(MODEL, [item(n) for n in range(4)], far_deadline())
        batch = [
            busy.submit(MODEL, [item(n)], far_deadline(), client="loud", priority=1)
            for n in range(6)
        ]
        with pytest.raises(Overloaded, match="queue is full"):  # only one item is behind the call
            busy.submit(MODEL, [item(9)] * 5, far_deadline(), client="quiet", priority=1)
        assert not any(call.done() for call in batch)
        fits = busy.submit(MODEL, [item(9)], far_deadline(), client="quiet", priority=1)
        assert [call.done() for call in batch] == [False] * 5 + [True]
        busy.engine.release()
        await asyncio.gather(urgent, *batch[:5], fits)


async def test_full_queue_displaces_as_few_calls_as_make_room() -> None:
    async with Busy(max_waiting_items=10) as busy:
        loud = [busy.submit(MODEL, [item(n)] * 2, far_deadline(), client="loud") for n in range(5)]
        quiet = busy.submit(MODEL, [item(9)] * 3, far_deadline(), client="quiet")
        assert [call.done() for call in loud] == [False, False, False, True, True]
        busy.engine.release()
        await asyncio.gather(*loud[:3], quiet)


async def test_call_above_the_limit_displaces_all_calls_behind_it() -> None:
    async with Busy(max_waiting_items=4) as busy:
        batch = [busy.submit(MODEL, [item(n)], far_deadline(), priority=1) for n in range(4)]
        large = busy.submit(MODEL, [item(9)] * 9, far_deadline())
        assert all(call.done() for call in batch)
        busy.engine.release()
        assert len((await large).rows) == 9


async def test_cancelled_calls_leave_the_queue() -> None:
    async with Busy(item_s=0.5) as busy:
        gone = busy.submit(MODEL, [item(n) for n in range(50)], far_deadline())
        stays = busy.submit(MODEL, [item(99)], far_deadline())
        gone.cancel()
        busy.scheduler.clean()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert busy.scheduler.waiting_items == 1
        assert busy.scheduler.measure_load().queued_s == pytest.approx(0.5)
        busy.engine.release()
        await stays


async def test_price_follows_the_passes_of_the_model() -> None:
    async with Busy() as busy:
        prices = busy.scheduler.prices
        assert prices.predict_s(MODEL, 2.0) == pytest.approx(2.0)
        for _ in range(MEASURED_PASSES):
            prices.record(MODEL, 1.0, 3.0)
        assert prices.predict_s(MODEL, 2.0) == pytest.approx(6.0, rel=0.05)
        assert prices.predict_s(OTHER, 2.0) == pytest.approx(2.0)


async def test_one_client_fills_a_part_of_a_pass_while_several_send() -> None:
    # An item takes 3 ms, so two items fit into the 8 ms that a client gets of each pass.
    async with Busy(item_s=3e-3, max_batch_items=32, client_pass_ms=8) as busy:
        alone = busy.submit(MODEL, [item(n) for n in range(1, 9)], far_deadline())
        busy.engine.release()
        await alone
        assert busy.later_passes == [list(range(1, 9))]
        busy.scheduler.prices.record(MODEL, 1e6, 1e6)
        loud = busy.submit(MODEL, [item(n) for n in range(10, 18)], far_deadline(), client="loud")
        quiet = busy.submit(MODEL, [item(20)], far_deadline(), client="quiet")
        await asyncio.gather(loud, quiet)
    assert [len(markers) for markers in busy.later_passes[1:]] == [3, 2, 2, 2]
    assert 20 in busy.later_passes[1]


@pytest.mark.parametrize(("clients", "prefetched"), [(["a", "a"], 2), (["a", "b"], 0)])
async def test_pass_is_prefetched_for_a_lone_client_only(
    clients: list[str], prefetched: int
) -> None:
    """A prefetched pass would take the place of items that a quiet client sends meanwhile."""
    busy = Busy(max_batch_items=2, prefetch_from_items=4)
    calls = [busy.submit(MODEL, [item(0)], far_deadline(), client=clients[0])]
    await wait_until(lambda: bool(busy.engine.passes))
    for client in clients:
        items = [item(n) for n in range(1, 5)]
        calls.append(busy.submit(MODEL, items, far_deadline(), client=client))
    await asyncio.sleep(0.01)
    assert busy.scheduler.waiting_items == 8 - prefetched
    busy.engine.release()
    await asyncio.gather(*calls)
    await busy.scheduler.drain()


async def test_equal_clients_fill_half_of_their_items() -> None:
    busy = Busy(item_s=3e-3, max_batch_items=32)
    calls = [
        busy.submit(MODEL, [item(n) for n in range(first, first + 8)], far_deadline(), client=one)
        for one, first in (("a", 10), ("b", 20))
    ]
    await wait_until(lambda: bool(busy.engine.passes))
    busy.engine.release()
    await asyncio.gather(*calls)
    await busy.scheduler.drain()
    assert [len(markers) for markers in busy.engine.passes] == [8, 8]


async def test_rate_of_former_load_drops_nothing() -> None:
    async with Busy() as busy:
        for _ in range(MEASURED_PASSES):
            busy.scheduler.prices.record(MODEL, 1.0, 100.0)
        accepted = busy.submit(MODEL, [item(1), item(2)], deadline_after(20.0))
        busy.engine.release()
        assert (await accepted).rows == [[1], [2]]
