from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.batching import passes
from deployments.batching.replica_hooks import LonePass
from deployments.config import BatchSettings
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import DeadlineExceeded, ModelUnavailable, Overloaded, WrongTask
from deployments.health import MAX_CONSECUTIVE_FAILURES, WorkerHealth
from deployments.messages import ModelRef
from deployments.records import ForwardPassRecord
from tests.support.batch_schedulers import DEFAULT_HOOKS, build_batch_scheduler
from tests.support.fakes import (
    TIMEOUT_S,
    FakeClock,
    FakeEngine,
    ListRecorder,
    ScriptedEngine,
    far_deadline,
    item,
    wait_until,
)
from tests.unit.deployments.batching.conftest import MODEL, OTHER, MakeScheduler


async def test_each_call_gets_its_own_rows_in_order(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine())
    first = scheduler.submit(MODEL, [item(1, 9), item(2, 3), item(3, 6)], far_deadline())
    second = scheduler.submit(MODEL, [item(4, 5)], far_deadline())
    assert (await first).rows == [[1], [2], [3]]
    assert (await second).rows == [[4]]


async def test_concurrent_calls_share_a_pass_and_report_its_size(
    make_scheduler: MakeScheduler,
) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler(engine)
    calls = [scheduler.submit(MODEL, [item(marker, 2)], far_deadline()) for marker in (1, 2, 3)]
    done = await asyncio.gather(*calls)
    assert engine.passes == [[1, 2, 3]]
    assert [call.timings.batch_items for call in done] == [3, 3, 3]
    assert [call.timings.tokens for call in done] == [2, 2, 2]


async def test_items_of_two_models_never_share_a_pass(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler(engine)
    await asyncio.gather(
        scheduler.submit(MODEL, [item(1)], far_deadline()),
        scheduler.submit(OTHER, [item(2)], far_deadline()),
        scheduler.submit(MODEL, [item(3)], far_deadline()),
    )
    assert sorted(engine.passes) == [[1, 3], [2]]


async def test_pooled_and_unpooled_calls_never_share_a_pass() -> None:
    passes: list[tuple[bool, list[int]]] = []

    def act(batch: Batch) -> Outputs:
        passes.append((batch.unpooled, batch.input_ids[:, 0].tolist()))
        return Outputs(batch.input_ids[:, :1].astype(np.float32))

    engine = ScriptedEngine(act)
    engine.info = EngineInfo("cpu-fake", supports_unpooled=True)
    scheduler = build_batch_scheduler(
        {MODEL: engine}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    await asyncio.gather(
        scheduler.submit(MODEL, [item(1)], far_deadline()),
        scheduler.submit(MODEL, [item(2), item(3)], far_deadline(), unpooled=True),
        scheduler.submit(MODEL, [item(4)], far_deadline()),
    )
    await scheduler.drain()
    assert sorted(passes) == [(False, [1, 4]), (True, [2, 3])]


async def test_unpooled_call_fails_without_engine_support(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler(engine)
    vectors = scheduler.submit(MODEL, [item(1)], far_deadline())
    with pytest.raises(WrongTask, match="Build the model again"):
        await scheduler.submit(MODEL, [item(2), item(3)], far_deadline(), unpooled=True)
    assert (await vectors).rows == [[1]]
    assert engine.passes == [[1]]


async def test_refused_unpooled_calls_change_neither_predictions_nor_failures(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine())
    predicted_s = scheduler.prices.predict_s(MODEL, 1.0)
    scheduler.health[MODEL].record_failure()
    for _ in range(50):
        with pytest.raises(WrongTask):
            await scheduler.submit(MODEL, [item(1)], far_deadline(), unpooled=True)
    assert scheduler.prices.predict_s(MODEL, 1.0) == predicted_s
    assert scheduler.health[MODEL].is_failing


async def test_submit_to_a_full_queue_raises_overloaded(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(FakeEngine(held=True), max_waiting_items=2)
    waiting = [scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)]
    with pytest.raises(Overloaded):
        scheduler.submit(MODEL, [item(3)], far_deadline())
    assert not any(call.done() for call in waiting)


@pytest.mark.usefixtures("long_quarantine")
async def test_call_for_a_model_in_quarantine_displaces_no_other(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine(held=True), max_waiting_items=2)
    health = scheduler.health[OTHER] = WorkerHealth(OTHER.id)
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        health.record_failure()
    loud = [
        scheduler.submit(MODEL, [item(marker)], far_deadline(), client="loud") for marker in (1, 2)
    ]
    with pytest.raises(ModelUnavailable):
        scheduler.submit(OTHER, [item(3)], far_deadline(), client="quiet")
    assert not any(call.done() for call in loud)


async def test_queue_accepts_items_after_the_engine_takes_some(
    make_scheduler: MakeScheduler,
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine, max_waiting_items=2)
    running = scheduler.submit(MODEL, [item(1), item(2)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = scheduler.submit(MODEL, [item(3), item(4)], far_deadline())
    assert scheduler.waiting_items == 2
    engine.release()
    assert len((await running).rows) == len((await waiting).rows) == 2


async def test_cancelled_call_never_reaches_the_engine(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    cancelled = scheduler.submit(MODEL, [item(2)], far_deadline())
    last = scheduler.submit(MODEL, [item(3)], far_deadline())
    cancelled.cancel()
    engine.release()
    await asyncio.gather(running, last)
    assert engine.passes == [[1], [3]]


async def test_expired_call_fails_without_a_pass(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    late = scheduler.submit(MODEL, [item(2), item(3)], time.monotonic() - 0.001)
    engine.release()
    with pytest.raises(DeadlineExceeded):
        await late
    assert (await running).rows == [[1]]
    assert engine.passes == [[1]]


async def test_two_passes_run_concurrently() -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)

    def wait_for_both(batch: Batch) -> Outputs:
        both.wait()  # raises BrokenBarrierError if only one pass runs
        return Outputs(batch.input_ids[:, :1].astype(np.float32))

    scheduler = build_batch_scheduler(
        {MODEL: ScriptedEngine(wait_for_both)},
        BatchSettings(),
        concurrent_passes=2,
        recorder=ListRecorder(),
    )
    calls = [scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)]
    assert [call.rows for call in await asyncio.gather(*calls)] == [[[1]], [[2]]]
    await scheduler.drain()


async def test_ragged_outputs_stay_with_their_items() -> None:
    def act(batch: Batch) -> Outputs:
        firsts = zip(batch.input_ids[:, :1], batch.lengths, strict=True)
        return Outputs([np.repeat(first[None], n, 0).astype(np.float32) for first, n in firsts])

    engine = ScriptedEngine(act)
    scheduler = build_batch_scheduler(
        {MODEL: engine}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    first = scheduler.submit(MODEL, [item(1, 3), item(2, 1)], far_deadline())
    second = scheduler.submit(MODEL, [item(3, 2)], far_deadline())
    assert [rows.tolist() for rows in (await first).rows] == [[[1], [1], [1]], [[2]]]
    assert [rows.tolist() for rows in (await second).rows] == [[[3], [3]]]
    await scheduler.drain()


async def test_recorder_gets_the_padding_of_every_pass() -> None:
    recorder: ListRecorder[ForwardPassRecord] = ListRecorder()
    settings = BatchSettings(pass_overhead_tokens=100)
    scheduler = build_batch_scheduler(
        {MODEL: FakeEngine()}, settings, concurrent_passes=1, recorder=recorder
    )
    await scheduler.submit(MODEL, [item(1, 10), item(2, 4)], far_deadline())
    await scheduler.drain()
    (record,) = recorder.records
    assert (record.model, record.compute) == (MODEL.id, "cpu-fake")
    assert (record.items, record.tokens, record.padded_tokens) == (2, 14, 20)
    assert record.waiting_items == 0


async def test_recorder_gets_the_longest_wait_in_the_queue() -> None:
    recorder: ListRecorder[ForwardPassRecord] = ListRecorder()
    engine = FakeEngine(held=True)
    scheduler = build_batch_scheduler(
        {MODEL: engine}, BatchSettings(), concurrent_passes=1, recorder=recorder
    )
    calls = [scheduler.submit(MODEL, [item(0)], far_deadline())]
    await wait_until(lambda: bool(engine.passes))
    for number in (1, 2):
        calls.append(scheduler.submit(MODEL, [item(number)], far_deadline()))
        await asyncio.sleep(0.01)
    engine.release()
    _, early, late = [(await call).timings for call in calls]
    await scheduler.drain()
    assert early.queue_s > late.queue_s
    assert recorder.records[1].queue_s == pytest.approx(early.queue_s)


async def test_drain_answers_accepted_calls(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = scheduler.submit(MODEL, [item(2)], far_deadline())
    draining = asyncio.ensure_future(scheduler.drain())
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 0.05)
    assert not draining.done(), "it must wait for the running pass"
    engine.release()
    await draining
    assert running.done()
    assert (await waiting).rows == [[2]]


async def test_health_reports_the_age_of_the_running_pass(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    assert scheduler.health[MODEL].running_s() == 0
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    await asyncio.sleep(0.02)
    assert 0.01 <= scheduler.health[MODEL].running_s() < TIMEOUT_S
    engine.release()
    await running
    assert scheduler.health[MODEL].running_s() == 0


async def test_new_settings_apply_to_the_next_pass(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler(engine)
    scheduler.settings = BatchSettings(max_batch_items=1)
    await asyncio.gather(
        *(scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2))
    )
    assert engine.passes == [[1], [2]]


async def test_only_a_pass_without_others_gets_the_lone_engine() -> None:
    usual, lone = FakeEngine(held=True), FakeEngine(held=True)
    shapes: list[tuple[int, int]] = []

    def plan(model: ModelRef, items: int, tokens: int) -> LonePass:
        shapes.append((items, tokens))
        return LonePass(lone)

    scheduler = build_batch_scheduler(
        {MODEL: usual},
        BatchSettings(),
        concurrent_passes=2,
        recorder=ListRecorder(),
        hooks=DEFAULT_HOOKS._replace(plan_lone_pass=plan),
    )
    first = scheduler.submit(MODEL, [item(1, 9)], far_deadline())
    await wait_until(lambda: lone.passes == [[1]])
    second = scheduler.submit(MODEL, [item(2, 3)], far_deadline())
    await wait_until(lambda: usual.passes == [[2]])
    for engine in (usual, lone):
        engine.release()
    assert [(await call).rows for call in (first, second)] == [[[1]], [[2]]]
    assert shapes == [(1, 9)]
    await scheduler.drain()


@pytest.mark.parametrize("uses_all_cores", [False, True])
async def test_lone_pass_counts_with_all_threads_that_it_uses(
    uses_all_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=clock))

    class SlowEngine(FakeEngine):
        def run(self, batch: Batch) -> Outputs:
            clock.now_s += 0.02
            return super().run(batch)

    scheduler = build_batch_scheduler(
        {MODEL: SlowEngine()},
        BatchSettings(),
        concurrent_passes=2,
        recorder=ListRecorder(),
        hooks=DEFAULT_HOOKS._replace(
            plan_lone_pass=lambda *_: LonePass(SlowEngine() if uses_all_cores else None),
            estimate_item=lambda *_: 0.02,
        ),
    )
    for _ in range(20):
        await scheduler.submit(MODEL, [item(1)], far_deadline())
    share = 1 if uses_all_cores else 0.5
    assert scheduler.prices.predict_s(MODEL, 0.02) == pytest.approx(share * 0.02, rel=0.2)
    await scheduler.drain()


async def test_brief_lone_pass_runs_on_the_event_loop() -> None:
    threads: list[int] = []

    class Engine(FakeEngine):
        def run(self, batch: Batch) -> Outputs:
            threads.append(threading.get_ident())
            return super().run(batch)

    scheduler = build_batch_scheduler(
        {MODEL: Engine()},
        BatchSettings(max_batch_items=1),
        concurrent_passes=2,
        recorder=ListRecorder(),
        hooks=DEFAULT_HOOKS._replace(
            plan_lone_pass=lambda _model, items, tokens: LonePass(is_brief=items * tokens < 10)
        ),
    )
    event_loop = threading.get_ident()
    short = await scheduler.submit(MODEL, [item(1, 3)], far_deadline())
    await scheduler.submit(MODEL, [item(2, 30)], far_deadline())
    two = [scheduler.submit(MODEL, [item(marker, 3)], far_deadline()) for marker in (3, 4)]
    assert [(await call).rows for call in two] == [[3], [4]]
    assert short.rows == [1]
    assert threads[0] == event_loop
    assert event_loop not in threads[1:3], "one is long, the other not alone"
    await scheduler.drain()


async def test_load_is_the_busy_threads_and_the_measured_time_of_the_queue(
    make_scheduler: MakeScheduler,
) -> None:
    engine = FakeEngine()
    scheduler = make_scheduler(engine, passes=2)
    assert scheduler.measure_load() == (0.0, 0.0)
    await scheduler.submit(MODEL, [item(1, 10)], far_deadline())
    assert 0 < scheduler.measure_load().busy < 1

    engine.hold()
    running = [scheduler.submit(MODEL, [item(n, 10)], far_deadline()) for n in range(2)]
    await wait_until(lambda: len(engine.passes) == 3)
    scheduler.measure_load()
    waiting = [scheduler.submit(MODEL, [item(9, 20)], far_deadline())]
    await asyncio.sleep(0)
    busy, queued_s = scheduler.measure_load()
    assert busy == pytest.approx(1.0)
    assert queued_s > 0
    waiting.append(scheduler.submit(MODEL, [item(9, 40)], far_deadline()))
    assert scheduler.measure_load().queued_s == pytest.approx(3 * queued_s)
    assert scheduler.measure_load(backlog=20).queued_s > scheduler.measure_load().queued_s
    engine.release()
    await asyncio.gather(*running, *waiting)
    scheduler.measure_load()  # ends the interval with work
    assert scheduler.measure_load() == (0.0, 0.0)


async def test_replica_that_stops_refuses_calls() -> None:
    scheduler = build_batch_scheduler(
        {MODEL: FakeEngine()}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    await scheduler.drain()
    with pytest.raises(Overloaded, match="is stopping"):
        scheduler.submit(MODEL, [item(1)], far_deadline())
