"""Tests of health checks, load and failed starts of a generator replica."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from deployments.config import GeneratorSettings, SchedulingSettings
from deployments.engines.decoder import DecoderInfo, DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.engines.onnx.decoder import OnnxDecoder
from deployments.errors import EngineFailed, EngineLost, ModelUnavailable, ServeError
from deployments.generation.step_results import StepOutput
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import Completion
from deployments.registry import ModelRegistry, RegisteredModel
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import TIMEOUT_S, wait_until
from tests.support.generator_replicas import OTHER, args, call, complete, replica


async def test_check_health_fails_when_the_engine_is_lost(store, refs) -> None:
    async with replica(store) as running:
        await complete(running, call(refs[DECODER]))
        health = running.pool.get(refs[DECODER]).scheduler.health
        health.record_failure(EngineLost("all processes have ended"))
        with pytest.raises(EngineLost, match="have ended"):
            await running.check_health()


async def start_hanging_step(
    running, ref, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task, threading.Event]:
    """Start a call whose prefill lasts until the event is set; return the call and the event."""
    scheduler, held = running.pool.get(ref).scheduler, threading.Event()
    monkeypatch.setattr(scheduler._decoder, "prefill", lambda *_, **__: held.wait(TIMEOUT_S))
    answer = asyncio.create_task(running.complete(call(ref)))
    await wait_until(lambda: scheduler.health.running_s() > 0)
    return answer, held


async def test_check_health_fails_when_a_step_hangs(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(store) as running:
        scheduler = running.pool.get(refs[DECODER]).scheduler
        answer, held = await start_hanging_step(running, refs[DECODER], monkeypatch)
        await running.check_health()
        monkeypatch.setattr(running, "_hang_timeout_s", 0.0)
        with pytest.raises(EngineFailed, match=r"tiny/.* a call has run for"):
            await running.check_health()
        held.set()
        assert isinstance(await answer, ServeError)
        # The step ends after the answer.
        await wait_until(lambda: scheduler.health.running_s() == 0)
        await running.check_health()


async def test_check_health_fails_when_a_step_of_an_unloaded_model_hangs(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.model_evictor.CLOSE_WAIT_S", 0.01)
    async with replica(store) as running:
        answer, held = await start_hanging_step(running, refs[DECODER], monkeypatch)
        answer.cancel()  # the client disconnects, and the step goes on
        await asyncio.gather(answer, return_exceptions=True)
        assert await running.pool.unload(refs[DECODER])
        await running.check_health()
        monkeypatch.setattr(running, "_hang_timeout_s", 0.0)
        with pytest.raises(EngineFailed, match=r"tiny/.* a call has run for"):
            await running.check_health()
        held.set()


@pytest.mark.parametrize("subject", ["prompt", "grammar"])
async def test_check_health_fails_when_a_prompt_or_grammar_hangs(
    subject: str, store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(store) as running:
        preparer = running.pool.get(refs[DECODER]).preparer
        held = threading.Event()
        method = {"prompt": "build_job", "grammar": "compile_grammar"}[subject]
        monkeypatch.setattr(preparer, method, lambda *_: held.wait(TIMEOUT_S))
        grammar = OTHER if subject == "grammar" else None
        answer = asyncio.create_task(running.complete(call(refs[DECODER], grammar=grammar)))
        health = getattr(running, f"_{subject}_health")
        await wait_until(lambda: health.running_s() > 0)
        await running.check_health()
        monkeypatch.setattr(running, "_hang_timeout_s", 0.0)
        with pytest.raises(EngineFailed, match=f"{subject} thread: a call has run for"):
            await running.check_health()
        held.set()
        with contextlib.suppress(Exception):
            await answer


async def test_check_health_fails_when_the_thread_of_the_steps_ended(store, refs) -> None:
    async with replica(store) as running:
        scheduler = running.pool.get(refs[DECODER]).scheduler
        await running.check_health()
        scheduler.close()
        await running.check_health()  # healthy, because `close` ended the thread
        scheduler._is_closing = False
        with pytest.raises(EngineFailed, match="the thread of its steps has ended"):
            await running.check_health()


@pytest.mark.usefixtures("long_quarantine")
async def test_quarantine_outlasts_an_eviction(store, refs) -> None:
    ref = refs[DECODER]
    async with replica(store) as running:
        health = running.pool.get(ref).scheduler.health
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            health.record_failure(EngineFailed("an illegal access"))
        assert await running.pool.unload(ref)
        assert isinstance(await running.complete(call(ref)), ModelUnavailable)
        assert running.pool.get(ref).scheduler.health is health
        health.record_success()
        await complete(running, call(ref))
        assert await running.pool.unload(ref)
        assert ref not in running._health, "a model that works is forgotten"


@pytest.mark.usefixtures("long_quarantine")
async def test_failed_model_load_closes_its_engine(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class FailingPreparer:
        def __init__(self, model: RegisteredModel, info: DecoderInfo) -> None:
            raise EngineFailed(f"{model.ref.id}: preparation failed")

    monkeypatch.setattr("deployments.replicas.generator.RequestPreparer", FailingPreparer)
    monkeypatch.setattr(OnnxDecoder, "close", lambda self: closed.append(self.info.compute_type))
    async with replica(store) as running:
        outcomes = [await running.complete(call(refs[DECODER])) for _ in range(3)]
    assert closed == ["cpu-fp32", "cpu-fp32"], "one engine per model"
    assert all(isinstance(o, EngineFailed) and "preparation failed" in o.message for o in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 3, "each has its own traceback"
    failures = running.pool._failures._failures.values()
    assert not any(failure.error.__traceback__ for failure in failures), "it holds memory"


def test_open_decoder_closes_a_decoder_that_fails_warmup(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: OnnxDecoder, *args: object, **kwargs: object) -> None:
        raise EngineFailed("no memory left")

    closed: list[OnnxDecoder] = []
    monkeypatch.setattr(OnnxDecoder, "decode", broken)
    monkeypatch.setattr(OnnxDecoder, "close", lambda self: closed.append(self))
    model = next(ModelRegistry.of(args(store)).open_models())
    spec = DecoderSpec.of(model.directory, model.manifest, model.manifest.candidates[0])
    with pytest.raises(EngineFailed, match="no memory left"):
        open_decoder(spec, GeneratorSettings(kv_slots=2, max_context_tokens=100))
    assert len(closed) == 1


async def test_load_is_the_used_slots_and_the_measured_time_of_waiting_requests(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(store) as running:
        assert running.measure_load() == (0.0, 0.0)
        await complete(running, call(refs[DECODER]))
        scheduler = running.pool.get(refs[DECODER]).scheduler
        steps, decode = threading.Semaphore(0), scheduler._executor.decode

        def decode_when_allowed(settings: SchedulingSettings) -> StepOutput:
            assert steps.acquire(timeout=TIMEOUT_S)
            return decode(settings)

        monkeypatch.setattr(scheduler._executor, "decode", decode_when_allowed)
        streams = [running.stream(call(refs[DECODER], max_new_tokens=150)) for _ in range(2)]
        await anext(streams[0])
        second = asyncio.ensure_future(anext(streams[1]))
        await wait_until(lambda: scheduler.slot_use == (1, 1))
        steps.release()
        await second
        waiting = asyncio.ensure_future(running.complete(call(refs["tiny/speaker"])))
        busy = running.measure_load().busy
        assert busy == 1.0
        assert isinstance(await waiting, Completion)
        waiting = asyncio.ensure_future(running.complete(call(refs[DECODER])))
        await wait_until(lambda: running.measure_load().queued_s > 0)
        for stream in streams:
            await stream.aclose()
        steps.release(1_000)
        assert isinstance(await waiting, Completion)
        assert running.measure_load() == (0.0, 0.0)


async def test_calls_without_a_job_yet_count_as_slots(store, refs) -> None:
    async with replica(store) as running:
        held = threading.Event()
        running._prompts.submit(lambda: held.wait(TIMEOUT_S))
        waiting = [asyncio.ensure_future(running.complete(call(refs[DECODER])))]
        await wait_until(lambda: running.measure_load().busy == 0.5)
        waiting += [asyncio.ensure_future(running.complete(call(refs[DECODER]))) for _ in range(2)]
        waiting[-1].cancel()
        await wait_until(lambda: running.measure_load() == (1.0, 0.0))
        held.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(one, Completion) for one in outcomes] == [True, True, False]
        await wait_until(lambda: running.measure_load() == (0.0, 0.0))
