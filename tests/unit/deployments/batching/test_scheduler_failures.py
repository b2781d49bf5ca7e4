"""The batch scheduler handles errors of engines and recorders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from deployments.batching.replica_hooks import LonePass
from deployments.config import BatchSettings
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed, EngineLost, ModelUnavailable
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.records import ForwardPassRecord
from tests.support.batch_schedulers import DEFAULT_HOOKS, build_batch_scheduler
from tests.support.fakes import (
    TIMEOUT_S,
    FakeEngine,
    ListRecorder,
    ScriptedEngine,
    far_deadline,
    item,
    wait_until,
)
from tests.unit.deployments.batching.conftest import MODEL, OTHER, MakeScheduler


async def test_failing_item_fails_alone(make_scheduler: MakeScheduler) -> None:
    engine = FakeEngine(failing={2})
    scheduler = make_scheduler(engine)
    good, bad, third = (
        scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2, 3)
    )
    with pytest.raises(EngineFailed):
        await bad
    assert (await good).rows == [[1]]
    assert (await third).rows == [[3]]
    assert engine.passes == [[1, 2, 3], [1], [2, 3], [2], [3]]


async def test_failing_item_of_a_long_list_is_found_by_halves(
    make_scheduler: MakeScheduler,
) -> None:
    engine = FakeEngine(failing={13})
    scheduler = make_scheduler(engine)
    calls = [scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in range(1, 17)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes.pop(12), EngineFailed)
    assert [outcome.rows for outcome in outcomes] == [[[n]] for n in range(1, 17) if n != 13]
    assert len(engine.passes) == 1 + 2 * 4


async def test_nan_row_fails_alone(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(FakeEngine(nan={2}))
    good, bad = (scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2))
    with pytest.raises(EngineFailed, match="NaN or infinity"):
        await bad
    assert (await good).rows == [[1]]


async def test_ragged_output_with_infinity_fails_alone() -> None:
    def act(batch: Batch) -> Outputs:
        bad = np.array([[0.0], [np.inf]], dtype=np.float32)
        valid = np.array([[0.0]], dtype=np.float32)
        return Outputs([bad if marker == 2 else valid for marker in batch.input_ids[:, 0]])

    scheduler = build_batch_scheduler(
        {MODEL: ScriptedEngine(act)}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    good, bad = (scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2))
    with pytest.raises(EngineFailed, match="NaN or infinity"):
        await bad
    assert (await good).rows == [[[0]]]
    await scheduler.drain()


async def test_call_with_one_nan_item_fails(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(FakeEngine(nan={2}))
    with pytest.raises(EngineFailed):
        await scheduler.submit(MODEL, [item(1), item(2)], far_deadline())


@pytest.mark.parametrize("is_brief", [False, True])
async def test_only_lone_passes_without_errors_report_their_time(is_brief: bool) -> None:
    reported: list[float] = []
    recorder: ListRecorder[ForwardPassRecord] = ListRecorder()
    lone = LonePass(is_brief=is_brief, record=reported.append)
    scheduler = build_batch_scheduler(
        {MODEL: FakeEngine(nan={2}, failing={3})},
        BatchSettings(),
        concurrent_passes=1,
        recorder=recorder,
        hooks=DEFAULT_HOOKS._replace(plan_lone_pass=lambda *_: lone),
    )
    for markers in ([1], [2], [1, 2], [3], [1, 3], [1, 1]):
        call = scheduler.submit(MODEL, [item(marker) for marker in markers], far_deadline())
        await asyncio.wait([call])
        assert (call.exception() is None) is (set(markers) == {1})
    await scheduler.drain()
    passes = recorder.records
    assert reported == [passes[0].forward_s, passes[-1].forward_s]


async def test_further_items_of_a_failed_call_leave_the_queue() -> None:
    class StoppingEngine(FakeEngine):
        """Engine that stops after the pass with marker 1, whose output is NaN."""

        def run(self, batch: Batch) -> Outputs:
            outputs = super().run(batch)
            if 1 in self.passes[-1]:
                self.hold()
            return outputs

    engine = StoppingEngine(nan={1})
    scheduler = build_batch_scheduler(
        {MODEL: engine},
        BatchSettings(max_batch_items=2, prefetch_from_items=1_000),
        concurrent_passes=1,
        recorder=ListRecorder(),
    )
    with pytest.raises(EngineFailed):
        await scheduler.submit(MODEL, [item(n) for n in range(1, 41)], far_deadline())
    await wait_until(lambda: scheduler.waiting_items == 0)
    engine.release()
    await scheduler.drain()
    assert len(engine.passes) <= 2


async def test_texts_without_finite_output_do_not_quarantine_the_model(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine(nan={2}, failing={3}))
    health = scheduler.health[MODEL]
    for marker in [2, 3] * MAX_CONSECUTIVE_FAILURES:
        with pytest.raises(EngineFailed):
            await scheduler.submit(MODEL, [item(marker)], far_deadline())
        assert not health.is_failing
    assert (await scheduler.submit(MODEL, [item(1)], far_deadline())).rows == [[1]]


@pytest.mark.usefixtures("long_quarantine")
async def test_engine_that_fails_on_known_tokens_is_quarantined(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine(nan={0, 2}))
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        with pytest.raises(EngineFailed):
            await scheduler.submit(MODEL, [item(2)], far_deadline())
    with pytest.raises(ModelUnavailable):
        await scheduler.submit(MODEL, [item(1)], far_deadline())


@pytest.mark.usefixtures("long_quarantine")
async def test_quarantine_outlasts_an_eviction_of_the_model(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine())
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        scheduler.health[MODEL].record_failure()
    for model in (MODEL, OTHER):
        scheduler.forget(model)
    with pytest.raises(ModelUnavailable):
        await scheduler.submit(MODEL, [item(1)], far_deadline())
    assert OTHER not in scheduler.health, "a healthy model leaves nothing behind"


async def test_bad_text_as_a_probe_ends_the_quarantine_of_an_engine_that_works(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine(nan={2}))
    health = scheduler.health[MODEL]
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        health.record_failure()
    health._probe_s = 0.0  # the next call is a probe
    with pytest.raises(EngineFailed):
        await scheduler.submit(MODEL, [item(2)], far_deadline())
    assert (await scheduler.submit(MODEL, [item(1)], far_deadline())).rows == [[1]]


def divide_by_zero(batch: Batch) -> Outputs:
    return Outputs(np.array([[1 // 0]], dtype=np.float32))


def drop_row(batch: Batch) -> Outputs:
    return Outputs(np.ones((len(batch.input_ids) - 1, 1), dtype=np.float32))


async def test_any_exception_fails_its_item_alone_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def act(batch: Batch) -> Outputs:
        markers = batch.input_ids[:, 0]
        if 2 in markers:
            raise IndexError("/secret/path of a node")
        return Outputs(markers[:, None].astype(np.float32))

    scheduler = build_batch_scheduler(
        {MODEL: ScriptedEngine(act)}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    good, bad = (scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2))
    with pytest.raises(EngineFailed, match="failed on this request") as raised:
        await bad
    assert "secret" not in str(vars(raised.value))
    assert "secret" in caplog.text
    assert (await good).rows == [[1]]
    await scheduler.drain()


async def test_lost_engine_fails_a_list_at_once() -> None:
    passes = []

    def act(batch: Batch) -> Outputs:
        passes.append(len(batch.input_ids))
        raise EngineLost("all processes have ended")

    scheduler = build_batch_scheduler(
        {MODEL: ScriptedEngine(act)}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    calls = [scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in range(4)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineLost] * 4
    assert passes == [4]
    with pytest.raises(EngineLost):
        scheduler.health[MODEL].check()
    await scheduler.drain()


@pytest.mark.parametrize("act", [divide_by_zero, drop_row])
async def test_any_engine_error_fails_all_calls(
    act: Callable[[Batch], Outputs],
) -> None:
    scheduler = build_batch_scheduler(
        {MODEL: ScriptedEngine(act)}, BatchSettings(), concurrent_passes=1, recorder=ListRecorder()
    )
    calls = [scheduler.submit(MODEL, [item(marker)], far_deadline()) for marker in (1, 2)]
    async with asyncio.timeout(TIMEOUT_S):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await scheduler.drain()
    assert [type(outcome) for outcome in outcomes] == [EngineFailed, EngineFailed]


async def test_passes_measured_as_instant_do_not_stop_the_scheduler(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FakeEngine())
    for _ in range(20_000):
        scheduler.prices.record(MODEL, 1.0, 0.0)
    calls = [scheduler.submit(MODEL, [item(1)], far_deadline(), client=client) for client in "ab"]
    async with asyncio.timeout(TIMEOUT_S):
        assert [done.rows for done in await asyncio.gather(*calls)] == [[[1]], [[1]]]


async def test_pass_is_answered_even_if_the_next_one_cannot_be_chosen(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(held=True)
    scheduler = make_scheduler(engine)
    running = scheduler.submit(MODEL, [item(1)], far_deadline())
    await wait_until(lambda: bool(engine.passes))
    waiting = scheduler.submit(MODEL, [item(2)], far_deadline())
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "_choose", lambda items: 1 // 0)
        engine.release()
        async with asyncio.timeout(TIMEOUT_S):
            assert (await running).rows == [[1]]
    later = scheduler.submit(MODEL, [item(3)], far_deadline())
    assert [done.rows for done in await asyncio.gather(waiting, later)] == [[[2]], [[3]]]


class BrokenRecorder:
    def record(self, done: ForwardPassRecord) -> None:
        raise RuntimeError("the recorder failed")


async def test_calls_succeed_when_the_recorder_fails() -> None:
    scheduler = build_batch_scheduler(
        {MODEL: FakeEngine()}, BatchSettings(), concurrent_passes=1, recorder=BrokenRecorder()
    )
    async with asyncio.timeout(TIMEOUT_S):
        assert (await scheduler.submit(MODEL, [item(1)], far_deadline())).rows == [[1]]
        assert (await scheduler.submit(MODEL, [item(2)], far_deadline())).rows == [[2]]
        await scheduler.drain()
