from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device, TaskName
from deployments.config import AppArgs, BatchSettings, EncoderSettings, ModelSettings
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelUnavailable,
    Overloaded,
    UnknownModel,
    WrongTask,
)
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import (
    BatchKey,
    CallResult,
    ModelRef,
    TokenizedBatch,
    TokenizedCall,
    TokenOffsets,
)
from deployments.records import ForwardPassRecord
from deployments.registry import ModelRegistry
from deployments.replicas.encoder import EncoderReplica
from deployments.tasks import TASKS, DecodeContext, Task
from deployments.tasks.embedding import EmbeddingOptions, FeatureExtraction
from tests.support.artifacts import (
    EMBEDDER,
    GRAPH_NAME,
    WIDTH,
    replace_sealed_file,
    seal,
    seal_tiny,
    seal_without_token_vectors,
)
from tests.support.fakes import (
    TIMEOUT_S,
    ListRecorder,
    ScriptedEngine,
    far_deadline,
    item,
    wait_until,
)

RAW = EmbeddingOptions(normalize=False, dimensions=WIDTH)
# fp32 sums of at most 16 values of size 1.
TOLERANCE = 1e-5


def args(store: Path) -> AppArgs:
    encoders = {device: EncoderSettings(concurrent_passes=2) for device in Device}
    return AppArgs(store=store, models=(ModelSettings(id=EMBEDDER),), encoders=encoders)


class EncoderHarness:
    """A replica with its recorded passes."""

    def __init__(self, store: Path, device: Device = Device.CPU) -> None:
        self.passes: ListRecorder[ForwardPassRecord] = ListRecorder()
        self.replica = EncoderReplica(args(store), device, self.passes)
        ref = ModelRegistry.of(args(store)).find(EMBEDDER).ref
        self.key = BatchKey(ref, TaskName.FEATURE_EXTRACTION, device, long=False)

    def batch(self, *calls: TokenizedCall | Exception) -> TokenizedBatch:
        """Build a batch whose items consist of token 5."""
        lengths = [n for call in calls if isinstance(call, TokenizedCall) for n in call.lengths]
        return TokenizedBatch(self.key, item(5, sum(lengths)).ids.tobytes(), calls, tokenize_s=0.25)


@pytest.fixture
async def encoder(tiny_store: Path) -> AsyncIterator[EncoderHarness]:
    harness = EncoderHarness(tiny_store)
    yield harness
    await harness.replica.close()


def call(*lengths: int, deadline_s: float | None = None, truncated: int = 0) -> TokenizedCall:
    return TokenizedCall(lengths, truncated, RAW, deadline_s or far_deadline())


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
    assert isinstance(failed, UnknownModel)
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


class RejectingTask(FeatureExtraction):
    """A task that rejects items of one token."""

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        if any(len(item.ids) == 1 for item in computed.items):
            raise InvalidField("an item has one token", field="inputs")
        return super().decode(computed, options)


class BuggyTask(FeatureExtraction):
    """A task with a bug in `decode`."""

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        raise KeyError("no such thing")


class TokenTask(FeatureExtraction):
    """A task that returns the tokens and the offsets of its items."""

    needs_vocabulary: ClassVar = True

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        assert computed.vocabulary is not None
        tokens = [[computed.vocabulary.token(i) for i in item.ids] for item in computed.items]
        return tokens, computed.token_offsets, computed.manifest.id


def replace_task(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    table = {**TASKS, TaskName.FEATURE_EXTRACTION: task}
    monkeypatch.setattr("deployments.replicas.encoder.TASKS", table)


async def test_task_error_fails_only_its_own_call(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_task(monkeypatch, RejectingTask())
    rejected, answered = await encoder.replica.infer(encoder.batch(call(1), call(2)))
    assert isinstance(rejected, InvalidField)
    assert rejected.field == "inputs"
    assert isinstance(answered, CallResult)


async def test_task_bug_fails_its_call_but_not_the_encoder(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        replace_task(patch, BuggyTask())
        (failed,) = await encoder.replica.infer(encoder.batch(call(2)))
    (answered,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(failed, EngineFailed)
    assert "no such thing" not in failed.message, "it is in the log"
    assert isinstance(answered, CallResult)


async def test_decode_receives_vocabulary_items_and_offsets_of_its_call(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_task(monkeypatch, TokenTask())
    encoder = EncoderHarness(tiny_store)
    offsets = TokenOffsets(
        0, np.zeros((2, 2), np.int32), np.zeros(2, np.int8), np.zeros(2, np.int32)
    )
    calls = (call(1, 3), call(2)._replace(token_offsets=(offsets,)))
    first, second = await encoder.replica.infer(encoder.batch(*calls))
    await encoder.replica.close()
    assert isinstance(first, CallResult)
    assert isinstance(second, CallResult)
    assert first.value == ([["the"], ["the"] * 3], (), EMBEDDER)
    assert second.value == ([["the"] * 2], (offsets,), EMBEDDER)


def unpooled(batch: TokenizedBatch) -> TokenizedBatch:
    """Return the same calls for token embeddings."""
    return batch._replace(key=batch.key._replace(task=TaskName.TOKEN_EMBEDDINGS))


async def test_token_embeddings_return_one_vector_per_token(encoder: EncoderHarness) -> None:
    plain = encoder.batch(call(3, 1), call(2))
    vectors, tokens = await asyncio.gather(
        encoder.replica.infer(plain), encoder.replica.infer(unpooled(plain))
    )
    assert [np.shape(outcome.value) for outcome in vectors] == [(2, WIDTH), (1, WIDTH)]
    assert [[row.shape for row in outcome.value] for outcome in tokens] == [
        [(3, WIDTH), (1, WIDTH)],
        [(2, WIDTH)],
    ]
    # All tokens are equal, so their mean equals each vector.
    np.testing.assert_allclose(tokens[0].value[0], vectors[0].value[[0] * 3], atol=TOLERANCE)


async def test_token_embeddings_beyond_the_limit_are_rejected(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.MAX_TOKEN_VALUES", 8 * WIDTH)
    batch = encoder.batch(call(4, 5), call(4, 4))
    rejected, answered = await encoder.replica.infer(unpooled(batch))
    assert isinstance(rejected, InputTooLong)
    assert "9 tokens; the maximum for token vectors is 8" in rejected.message
    assert isinstance(answered, CallResult)
    assert all(isinstance(outcome, CallResult) for outcome in await encoder.replica.infer(batch))


async def test_large_outputs_of_all_calls_share_a_budget(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.MAX_OUTPUT_VALUES", 8 * WIDTH)
    calls = unpooled(encoder.batch(call(5), call(5)))
    accepted, refused = await encoder.replica.infer(calls)
    assert isinstance(accepted, CallResult)
    assert isinstance(refused, Overloaded)
    assert "large outputs" in refused.message
    (again,) = await encoder.replica.infer(unpooled(encoder.batch(call(5))))
    assert isinstance(again, CallResult)
    assert encoder.replica._output_values.used == 0


async def test_fill_mask_beyond_the_mask_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.MAX_MASK_VALUES", 8 * WIDTH)
    directory = seal_tiny(tmp_path, EMBEDDER, tasks=(TaskName.FILL_MASK,))
    manifest = ArtifactManifest.read(directory)
    seal(directory, manifest.model_copy(update={"mask_token": 5}))
    encoder = EncoderHarness(tmp_path)
    encoder.key = encoder.key._replace(task=TaskName.FILL_MASK)
    rejected, accepted = await encoder.replica.infer(encoder.batch(call(4, 5), call(4, 4)))
    await encoder.replica.close()
    assert isinstance(rejected, InputTooLong)
    assert "9 mask tokens; the maximum is 8" in rejected.message
    assert not isinstance(accepted, InputTooLong)


async def test_model_without_token_output_asks_for_a_new_build(tmp_path: Path) -> None:
    seal_without_token_vectors(tmp_path, EMBEDDER)
    encoder = EncoderHarness(tmp_path)
    (rejected,) = await encoder.replica.infer(unpooled(encoder.batch(call(2))))
    (answered,) = await encoder.replica.infer(encoder.batch(call(2)))
    await encoder.replica.close()
    assert isinstance(rejected, WrongTask)
    assert "Build the model again" in rejected.message
    assert isinstance(answered, CallResult)


async def test_cancelled_batch_is_dropped_before_the_engine(encoder: EncoderHarness) -> None:
    encoder.replica.configure(BatchSettings(max_batch_items=1))
    cancelled = asyncio.ensure_future(encoder.replica.infer(encoder.batch(*[call(2)] * 20)))
    await asyncio.sleep(0)  # submitted
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    (last,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(last, CallResult)
    # At most two running passes, one planned pass, and the pass of the last call.
    assert len(encoder.passes.records) <= 4


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
    monkeypatch.setattr("deployments.replicas.encoder.INLINE_VALUES", 1)
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
    replica._swap_engine(model, ScriptedEngine(hang))
    hanging = asyncio.create_task(replica.infer(encoder.batch(call(3))))
    await wait_until(started.is_set)
    replica._swap_engine(model, working)
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
