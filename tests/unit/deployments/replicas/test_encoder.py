from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.config import BatchSettings, EncoderSettings, ModelSettings
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import (
    ArtifactMissing,
    DeadlineExceeded,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    ModelUnavailable,
    Overloaded,
)
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import BatchKey, CallResult, ModelRef, TokenizedBatch
from deployments.registry import ModelRegistry
from deployments.replicas.encoder import EncoderReplica
from deployments.tasks import DecodeContext
from deployments.tasks.embedding import FeatureExtraction
from tests.support.artifacts import EMBEDDER, GRAPH_NAME, WIDTH, replace_sealed_file, seal_tiny
from tests.support.encoder_harness import TOLERANCE, EncoderHarness, args, call, replace_task
from tests.support.fakes import TIMEOUT_S, ListRecorder, ScriptedEngine, item, wait_until


async def test_infer_returns_outcomes_in_order_including_errors(encoder: EncoderHarness) -> None:
    rejected = InputTooLong("too long", field="inputs")
    first, second, third, late = await encoder.replica.infer(
        encoder.batch(
            call(3, 4, truncated=1), rejected, call(2), call(2, deadline_s=time.monotonic() - 1)
        )
    )
    assert np.shape(first.value) == (2, WIDTH)
    assert second is rejected
    assert np.shape(third.value) == (1, WIDTH)
    assert isinstance(late, DeadlineExceeded)
    assert (first.truncated, third.truncated) == (1, 0)


async def test_call_result_reports_compute_type_and_timings(encoder: EncoderHarness) -> None:
    (answer,) = await encoder.replica.infer(encoder.batch(call(3, 4)))
    assert isinstance(answer, CallResult)
    assert answer.compute_type == "cpu-fp32"
    assert (answer.timings.tokens, answer.timings.tokenize_s) == (7, 0.25)
    assert answer.timings.forward_s > 0
    assert sum(record.tokens for record in encoder.passes.records) == 7


async def test_infer_is_batch_invariant(encoder: EncoderHarness) -> None:
    (alone,) = await encoder.replica.infer(encoder.batch(call(3)))
    together = await encoder.replica.infer(encoder.batch(*(call(n) for n in (16, 3, 1, 9))))
    np.testing.assert_allclose(together[1].value, alone.value, atol=TOLERANCE)


async def test_infer_rejects_only_calls_beyond_the_queue_limit(
    encoder: EncoderHarness,
) -> None:
    encoder.replica.configure(BatchSettings(max_waiting_items=3))
    outcomes = await encoder.replica.infer(encoder.batch(call(2, 2), call(2, 2), call(2)))
    assert [type(outcome) for outcome in outcomes] == [CallResult, Overloaded, CallResult]


async def test_model_without_a_graph_for_the_device_is_unavailable(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER, devices=(Device.CPU,))
    encoder = EncoderHarness(tmp_path, Device.GPU)
    (outcome,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(outcome, HardwareUnavailable)
    assert "gpu encoder" in outcome.message
    await encoder.replica.close()


async def test_unknown_model_fails_only_its_own_batch(encoder: EncoderHarness) -> None:
    known = encoder.batch(call(2))
    unknown = known._replace(key=known.key._replace(model=ModelRef("no/such", "0123456789ab")))
    (failed,), (answered,) = await asyncio.gather(
        encoder.replica.infer(unknown), encoder.replica.infer(known)
    )
    assert isinstance(failed, ArtifactMissing)
    assert failed.elsewhere, "another replica may have it"
    assert isinstance(answered, CallResult)


async def test_broken_graph_fails_only_its_own_model(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    broken = seal_tiny(tmp_path, "tiny/broken")
    replace_sealed_file(broken, GRAPH_NAME, b"not a graph")
    both = (ModelSettings(id="tiny/broken"), ModelSettings(id=EMBEDDER))
    settings = args(tmp_path).model_copy(update={"models": both})
    replica = EncoderReplica(settings, Device.CPU, ListRecorder())
    outcomes = {}
    for model in both:
        ref = ModelRegistry.of(settings).find(model.id).ref
        key = BatchKey(ref, TaskName.FEATURE_EXTRACTION, Device.CPU, long=False)
        batch = TokenizedBatch(key, item(1, 2).ids.tobytes(), (call(2),), 0.0)
        (outcomes[model.id],) = await replica.infer(batch)
    await replica.close()
    assert isinstance(outcomes["tiny/broken"], EngineFailed)
    assert isinstance(outcomes[EMBEDDER], CallResult)


def test_encoder_with_a_missing_provider_does_not_start(tmp_path: Path) -> None:
    seal_tiny(tmp_path, EMBEDDER)
    encoders = {Device.GPU: EncoderSettings(providers=("AbacusExecutionProvider",))}
    settings = args(tmp_path).model_copy(update={"encoders": encoders})
    with pytest.raises(EngineFailed, match="Abacus"):
        EncoderReplica(settings, Device.GPU, ListRecorder())


async def test_cancelled_batch_is_dropped_before_the_engine(encoder: EncoderHarness) -> None:
    encoder.replica.configure(BatchSettings(max_batch_items=1))
    cancelled = asyncio.ensure_future(encoder.replica.infer(encoder.batch(*[call(2)] * 20)))
    await asyncio.sleep(0)  # lets the task submit its batch
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    (last,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(last, CallResult)
    # At most two running passes, one planned pass, and the pass of the last call.
    assert len(encoder.passes.records) <= 4


@pytest.mark.usefixtures("long_quarantine")
async def test_failing_model_is_quarantined_and_its_replica_lives(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = {id(engine): engine for engine in encoder.replica._engines.values()}.values()

    def broken(batch: Batch) -> Outputs:
        raise EngineFailed("illegal access")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "run", broken)
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            (failed,) = await encoder.replica.infer(encoder.batch(call(2)))
            assert isinstance(failed, EngineFailed)
        (refused,) = await encoder.replica.infer(encoder.batch(call(2)))
        assert isinstance(refused, ModelUnavailable)
        await encoder.replica.check_health()
    monkeypatch.setattr("deployments.health.time.perf_counter", lambda: time.monotonic() + 60)
    for _ in range(2):
        (answered,) = await encoder.replica.infer(encoder.batch(call(2)))
        assert isinstance(answered, CallResult), "reopened by a probe"


async def test_empty_queue_accepts_a_call_of_any_size(encoder: EncoderHarness) -> None:
    encoder.replica.configure(BatchSettings(max_waiting_items=3))
    (answer,) = await encoder.replica.infer(encoder.batch(call(2, 2, 2, 2, 2)))
    assert isinstance(answer, CallResult)


async def test_large_output_is_decoded_off_the_event_loop(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ThreadRecordingTask(FeatureExtraction):
        threads: ClassVar[list[int]] = []

        def decode(self, computed: DecodeContext, options: Any) -> Any:
            self.threads.append(threading.get_ident())
            return super().decode(computed, options)

    replace_task(monkeypatch, ThreadRecordingTask())
    (short,) = await encoder.replica.infer(encoder.batch(call(2)))
    monkeypatch.setattr("deployments.replicas.encoder_calls.INLINE_DECODE_S", 0)
    (long,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(short, CallResult)
    assert isinstance(long, CallResult)
    main_thread = threading.get_ident()
    assert [thread == main_thread for thread in ThreadRecordingTask.threads] == [True, False]


async def test_check_health_passes_for_an_idle_encoder(encoder: EncoderHarness) -> None:
    await encoder.replica.check_health()


async def test_check_health_fails_while_one_of_two_passes_hangs(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, started = threading.Event(), threading.Event()

    def hang(_batch: Batch) -> Outputs:
        started.set()
        assert held.wait(TIMEOUT_S)
        return Outputs(np.zeros((1, WIDTH), np.float32))

    model, replica = encoder.key.model, encoder.replica
    working = replica._engines[model]
    replica._swap_engine(model, lambda: ScriptedEngine(hang))
    hanging = asyncio.create_task(replica.infer(encoder.batch(call(3))))
    await wait_until(started.is_set)
    replica._swap_engine(model, lambda: working)
    (answer,) = await replica.infer(encoder.batch(call(2)))
    assert isinstance(answer, CallResult)
    await replica.check_health()
    monkeypatch.setattr(replica, "_hang_timeout_s", 0.0)
    monkeypatch.setattr("deployments.health.SLOW_FACTOR", 0.0)
    with pytest.raises(EngineFailed, match="a call has run for"):
        await replica.check_health()
    held.set()
    await hanging
    await replica.check_health()
