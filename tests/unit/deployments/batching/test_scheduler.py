from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from deployments.batching.scheduler import BatchScheduler, LonePass
from deployments.config import BatchSettings
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import DeadlineExceeded, ModelUnavailable, Overloaded, WrongTask
from deployments.health import MAX_CONSECUTIVE_FAILURES, WorkerHealth
from deployments.messages import ModelRef
from deployments.records import ForwardPassRecord
from tests.support.fakes import (
    TIMEOUT_S,
    FakeEngine,
    ListRecorder,
    ScriptedEngine,
    far_deadline,
    item,
    wait_until,
)
from tests.unit.deployments.batching.conftest import MODEL, OTHER, MakeLoop


async def test_each_call_gets_its_own_rows_in_order(
    make_loop: MakeLoop,
) -> None:
    loop = make_loop(FakeEngine())
    first = loop.submit(MODEL, [item(1, 9), item(2, 3), item(3, 6)], far_deadline())
    second = loop.submit(MODEL, [item(4, 5)], far_deadline())
    assert (await first).rows == [[1], [2], [3]]
    assert (await second).rows == [[4]]


async def test_concurrent_calls_share_a_pass_and_report_its_size(make_loop: MakeLoop) -> None:
    engine = FakeEngine()
    loop = make_loop(engine)
    calls = [loop.submit(MODEL, [item(marker, 2)], far_deadline()) for marker in (1, 2, 3)]
    done = await asyncio.gather(*calls)
    assert engine.passes == [[1, 2, 3]]
    assert [call.timings.batch_items for call in done] == [3, 3, 3]
    assert [call.timings.tokens for call in done] == [2, 2, 2]


async def test_items_of_two_models_never_share_a_pass(make_loop: MakeLoop) -> None:
    engine = FakeEngine()
    loop = make_loop(engine)
    await asyncio.gather(
        loop.submit(MODEL, [item(1)], far_deadline()),
        loop.submit(OTHER, [item(2)], far_deadline()),
        loop.submit(MODEL, [item(3)], far_deadline()),
    )
    assert sorted(engine.passes) == [[1, 3], [2]]


async def test_pooled_and_unpooled_calls_never_share_a_pass() -> None:
    passes: list[tuple[bool, list[int]]] = []

    def act(batch: Batch) -> Outputs:
        passes.append((batch.unpooled, batch.input_ids[:, 0].tolist()))
        return Outputs(batch.input_ids[:, :1].astype(np.float32))

    engine = ScriptedEngine(act)
    engine.info = EngineInfo("cpu-fake", supports_unpooled=True)
    loop = BatchScheduler(
        {MODEL: engine}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    await asyncio.gather(
        loop.submit(MODEL, [item(1)], far_deadline()),
        loop.submit(MODEL, [item(2), item(3)], far_deadline(), unpooled=True),
        loop.submit(MODEL, [item(4)], far_deadline()),
    )
    await loop.drain()
    assert sorted(passes) == [(False, [1, 4]), (True, [2, 3])]


async def test_unpooled_call_fails_without_engine_support(make_loop: MakeLoop) -> None:
    engine = FakeEngine()
    loop = make_loop(engine)
    vectors = loop.submit(MODEL, [item(1)], far_deadline())
    with pytest.raises(WrongTask, match="Build the model again"):
        await loop.submit(MODEL, [item(2), item(3)], far_deadline(), unpooled=True)
    assert (await vectors).rows == [[1]]
    assert engine.passes == [[1]]


async def test_refused_unpooled_calls_change_neither_predictions_nor_failures(
    make_loop: MakeLoop,
) -> None:
    loop = make_loop(FakeEngine())
    predicted_s = loop.prices.predict_s(MODEL, 1.0)
    loop.health[MODEL].record_failure()
    for _ in range(50):
        with pytest.raises(WrongTask):
            await loop.submit(MODEL, [item(1)], far_deadline(), unpooled=True)
    assert loop.prices.predict_s(MODEL, 1.0) == predicted_s
    assert loop.health[MODEL].is_failing


async def test_submit_to_a_full_queue_raises_overloaded(make_loop: MakeLoop) -> None:
    loop = make_loop(FakeEngine(held=True), max_waiting_items=2)
    waiting = [loop.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)]
    with pytest.raises(Overloaded):
        loop.submit(MODEL, [item(3)], far_deadline())
    assert not any(call.done() for call in waiting)


async def test_call_for_a_model_in_quarantine_displaces_no_other(make_loop: MakeLoop) -> None:
    loop = make_loop(FakeEngine(held=True), max_waiting_items=2)
    health = loop.health[OTHER] = WorkerHealth(OTHER.id)
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        health.record_failure()
    loud = [loop.submit(MODEL, [item(marker)], far_deadline(), client="loud") for marker in (1, 2)]
    with pytest.raises(ModelUnavailable):
        loop.submit(OTHER, [item(3)], far_deadline(), client="quiet")
    assert not any(call.done() for call in loud)


async def test_queue_accepts_items_after_the_engine_takes_some(
    make_loop: MakeLoop,
) -> None:
    engine = FakeEngine(held=True)
    loop = make_loop(engine, max_waiting_items=2)
    running = loop.submit(MODEL, [item(1), item(2)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = loop.submit(MODEL, [item(3), item(4)], far_deadline())
    assert loop.waiting_items == 2
    engine.release()
    assert len((await running).rows) == len((await waiting).rows) == 2


async def test_cancelled_call_never_reaches_the_engine(make_loop: MakeLoop) -> None:
    engine = FakeEngine(held=True)
    loop = make_loop(engine)
    running = loop.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    cancelled = loop.submit(MODEL, [item(2)], far_deadline())
    last = loop.submit(MODEL, [item(3)], far_deadline())
    cancelled.cancel()
    engine.release()
    await asyncio.gather(running, last)
    assert engine.passes == [[1], [3]]


async def test_expired_call_fails_without_a_pass(make_loop: MakeLoop) -> None:
    engine = FakeEngine(held=True)
    loop = make_loop(engine)
    running = loop.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    late = loop.submit(MODEL, [item(2), item(3)], time.monotonic() - 0.001)
    engine.release()
    with pytest.raises(DeadlineExceeded):
        await late
    assert (await running).rows == [[1]]
    assert engine.passes == [[1]]


async def test_two_passes_run_concurrently() -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)

    def wait_for_both(batch: Batch) -> Outputs:
        both.wait()  # raises unless both passes run at once
        return Outputs(batch.input_ids[:, :1].astype(np.float32))

    loop = BatchScheduler(
        {MODEL: ScriptedEngine(wait_for_both)},
        BatchSettings(),
        concurrent_passes=2,
        recorder=ListRecorder(),
    )
    calls = [loop.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)]
    assert [call.rows for call in await asyncio.gather(*calls)] == [[[1]], [[2]]]
    await loop.drain()


async def test_ragged_outputs_stay_with_their_items() -> None:
    def act(batch: Batch) -> Outputs:
        firsts = zip(batch.input_ids[:, :1], batch.lengths, strict=True)
        return Outputs([np.repeat(first[None], n, 0).astype(np.float32) for first, n in firsts])

    engine = ScriptedEngine(act)
    loop = BatchScheduler(
        {MODEL: engine}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    first = loop.submit(MODEL, [item(1, 3), item(2, 1)], far_deadline())
    second = loop.submit(MODEL, [item(3, 2)], far_deadline())
    assert [rows.tolist() for rows in (await first).rows] == [[[1], [1], [1]], [[2]]]
    assert [rows.tolist() for rows in (await second).rows] == [[[3], [3]]]
    await loop.drain()


async def test_recorder_gets_the_padding_of_every_pass() -> None:
    recorder: ListRecorder[ForwardPassRecord] = ListRecorder()
    settings = BatchSettings(pass_overhead_tokens=100)
    loop = BatchScheduler({MODEL: FakeEngine()}, settings, concurrent_passes=1, recorder=recorder)
    await loop.submit(MODEL, [item(1, 10), item(2, 4)], far_deadline())
    await loop.drain()
    (record,) = recorder.records
    assert (record.model, record.compute) == (MODEL.id, "cpu-fake")
    assert (record.items, record.tokens, record.padded_tokens) == (2, 14, 20)
    assert record.waiting_items == 0


async def test_drain_answers_accepted_calls(make_loop: MakeLoop) -> None:
    engine = FakeEngine(held=True)
    loop = make_loop(engine)
    running = loop.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = loop.submit(MODEL, [item(2)], far_deadline())
    draining = asyncio.ensure_future(loop.drain())
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 0.05)
    assert not draining.done(), "it must wait for the running pass"
    engine.release()
    await draining
    assert running.done()
    assert (await waiting).rows == [[2]]


async def test_health_reports_the_age_of_the_running_pass(make_loop: MakeLoop) -> None:
    engine = FakeEngine(held=True)
    loop = make_loop(engine)
    assert loop.health[MODEL].running_s() == 0
    running = loop.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    await asyncio.sleep(0.02)
    assert 0.01 <= loop.health[MODEL].running_s() < TIMEOUT_S
    engine.release()
    await running
    assert loop.health[MODEL].running_s() == 0


async def test_new_settings_apply_to_the_next_pass(make_loop: MakeLoop) -> None:
    engine = FakeEngine()
    loop = make_loop(engine)
    loop.settings = BatchSettings(max_batch_items=1)
    await asyncio.gather(*(loop.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)))
    assert engine.passes == [[1], [2]]


async def test_only_a_pass_without_others_gets_the_lone_engine() -> None:
    usual, lone = FakeEngine(held=True), FakeEngine(held=True)
    shapes: list[tuple[int, int]] = []

    def plan(model: ModelRef, items: int, tokens: int) -> LonePass:
        shapes.append((items, tokens))
        return LonePass(lone)

    loop = BatchScheduler(
        {MODEL: usual},
        BatchSettings(),
        concurrent_passes=2,
        recorder=ListRecorder(),
        plan_lone_pass=plan,
    )
    first = loop.submit(MODEL, [item(1, 9)], far_deadline())
    await wait_until(lambda: lone.passes == [[1]])
    second = loop.submit(MODEL, [item(2, 3)], far_deadline())
    await wait_until(lambda: usual.passes == [[2]])
    for engine in (usual, lone):
        engine.release()
    assert [(await call).rows for call in (first, second)] == [[[1]], [[2]]]
    assert shapes == [(1, 9)]
    await loop.drain()


@pytest.mark.parametrize("uses_all_cores", [False, True])
async def test_lone_pass_counts_with_all_threads_that_it_uses(uses_all_cores: bool) -> None:
    class SlowEngine(FakeEngine):
        def run(self, batch: Batch) -> Outputs:
            time.sleep(0.02)
            return super().run(batch)

    records: ListRecorder[ForwardPassRecord] = ListRecorder()
    loop = BatchScheduler(
        {MODEL: SlowEngine()},
        BatchSettings(),
        concurrent_passes=2,
        recorder=records,
        plan_lone_pass=lambda _model, _items, _tokens: LonePass(
            SlowEngine() if uses_all_cores else None
        ),
        estimate_item=lambda _model, _tokens: 0.02,
    )
    for _ in range(20):
        await loop.submit(MODEL, [item(1)], far_deadline())
    pass_s = sum(record.forward_s for record in records.records) / len(records.records)
    share = 1 if uses_all_cores else 0.5
    assert loop.prices.predict_s(MODEL, 0.02) == pytest.approx(share * pass_s, rel=0.2)
    await loop.drain()


async def test_brief_lone_pass_runs_on_the_event_loop() -> None:
    threads: list[int] = []

    class Engine(FakeEngine):
        def run(self, batch: Batch) -> Outputs:
            threads.append(threading.get_ident())
            return super().run(batch)

    loop = BatchScheduler(
        {MODEL: Engine()},
        BatchSettings(max_batch_items=1),
        concurrent_passes=2,
        recorder=ListRecorder(),
        plan_lone_pass=lambda _model, items, tokens: LonePass(is_brief=items * tokens < 10),
    )
    event_loop = threading.get_ident()
    short = await loop.submit(MODEL, [item(1, 3)], far_deadline())
    await loop.submit(MODEL, [item(2, 30)], far_deadline())
    two = [loop.submit(MODEL, [item(marker, 3)], far_deadline()) for marker in (3, 4)]
    assert [(await call).rows for call in two] == [[3], [4]]
    assert short.rows == [1]
    assert threads[0] == event_loop
    assert event_loop not in threads[1:3], "one is long, the other not alone"
    await loop.drain()


async def test_load_is_the_busy_threads_and_the_measured_time_of_the_queue(
    make_loop: MakeLoop,
) -> None:
    engine = FakeEngine()
    loop = make_loop(engine, passes=2)
    assert loop.load() == (0.0, 0.0)
    await loop.submit(MODEL, [item(1, 10)], far_deadline())
    assert 0 < loop.load().busy < 1

    engine.hold()
    running = [loop.submit(MODEL, [item(n, 10)], far_deadline()) for n in range(2)]
    await wait_until(lambda: len(engine.passes) == 3)
    loop.load()
    waiting = [loop.submit(MODEL, [item(9, 20)], far_deadline())]
    await asyncio.sleep(0)
    busy, queued_s = loop.load()
    assert busy == pytest.approx(1.0)
    assert queued_s > 0
    waiting.append(loop.submit(MODEL, [item(9, 40)], far_deadline()))
    assert loop.load().queued_s == pytest.approx(3 * queued_s)
    assert loop.load(backlog=20).queued_s > loop.load().queued_s
    engine.release()
    await asyncio.gather(*running, *waiting)
    assert loop.load().queued_s == 0.0
