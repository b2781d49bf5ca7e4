from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.config import AppArgs, EncoderSettings
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import DigestMismatch, EngineFailed
from deployments.messages import BatchKey, CallResult, ModelRef, TokenizedBatch, TokenizedCall
from deployments.registry import open_model
from deployments.replicas import model_evictor
from deployments.replicas.encoder import ENGINE_BYTES, EncoderReplica
from deployments.replicas.pool_memory import ARENA_BYTES_PER_PASS, count_arena_bytes
from deployments.tasks.embedding import EmbeddingOptions
from deployments.tokenization.encodings import measure_tokenizer
from tests.support.all_models import FILL_MASK_MODEL, seal_token_model
from tests.support.artifacts import (
    GRAPH_NAME,
    WIDTH,
    replace_sealed_file,
    seal_tiny,
    tiny_manifest,
)
from tests.support.fakes import TIMEOUT_S, ListRecorder, far_deadline, item, wait_until

NAMES = ("tiny/first", "tiny/second")


class GatedEngine:
    """An engine whose pass waits for `gate`."""

    info = EngineInfo(compute_type="cpu-fake")

    def __init__(self) -> None:
        self.gate, self.started, self.closed = (threading.Event() for _ in range(3))

    def run(self, _batch: Batch) -> Outputs:
        self.started.set()
        assert self.gate.wait(TIMEOUT_S)
        assert not self.closed.is_set(), "closed during a pass"
        return Outputs(np.zeros((1, WIDTH), np.float32))

    def close(self) -> None:
        self.closed.set()


class PoolHarness:
    """An encoder replica with memory for one of its two models; neither is in its configuration."""

    def __init__(self, store: Path) -> None:
        self.refs = [ModelRef(name, seal_tiny(store, name).name) for name in NAMES]
        room = 2 * ARENA_BYTES_PER_PASS + ENGINE_BYTES * 3 // 2
        settings = EncoderSettings(pool_bytes=room, concurrent_passes=2)
        args = AppArgs(store=store, encoders={Device.CPU: settings})
        self.replica = EncoderReplica(args, Device.CPU, ListRecorder())

    async def infer(self, number: int) -> object:
        key = BatchKey(self.refs[number], TaskName.FEATURE_EXTRACTION, Device.CPU, long=False)
        options = EmbeddingOptions(normalize=False, dimensions=WIDTH)
        call = TokenizedCall((3,), 0, options, far_deadline())
        batch = TokenizedBatch(key, item(5, 3).ids.tobytes(), (call,), 0.0)
        (outcome,) = await self.replica.infer(batch)
        return outcome


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolHarness]:
    monkeypatch.setattr(model_evictor, "ROOM_WAIT_S", TIMEOUT_S)
    harness = PoolHarness(tmp_path)
    yield harness
    await harness.replica.close()


async def test_models_that_nobody_configured_are_loaded_in_turns(harness: PoolHarness) -> None:
    for number in (0, 1, 0, 1):
        assert isinstance(await harness.infer(number), CallResult)
        assert harness.replica.pool.refs() == [harness.refs[number]]
    assert set(harness.replica._engines) == {harness.refs[1]}
    assert set(harness.replica._scheduler.health) == {harness.refs[1]}


@pytest.mark.parametrize(
    ("device", "arena_bytes"), [(Device.CPU, 0), (Device.GPU, 2 * ARENA_BYTES_PER_PASS)]
)
async def test_each_model_on_a_gpu_counts_the_arena_of_its_session(
    device: Device, arena_bytes: int, tmp_path: Path
) -> None:
    """On the CPU, all sessions share one arena, for which a part of `pool_bytes` is reserved."""
    refs = [ModelRef(name, seal_tiny(tmp_path, name).name) for name in NAMES]
    args = AppArgs(store=tmp_path, encoders={device: EncoderSettings(concurrent_passes=2)})
    replica = EncoderReplica(args, device, ListRecorder())
    for ref in refs:
        async with replica.pool.lease(ref):
            pass
    graphs = sum(path.stat().st_size for path in tmp_path.rglob(GRAPH_NAME))
    assert replica.pool.bytes == graphs + len(refs) * (ENGINE_BYTES + arena_bytes)
    await replica.close()


async def test_calls_are_counted_and_not_the_micro_batches(harness: PoolHarness) -> None:
    key = BatchKey(harness.refs[0], TaskName.FEATURE_EXTRACTION, Device.CPU, long=False)
    await harness.replica.infer(TokenizedBatch(key, b"", (), 0.0))  # only loads the model
    options = EmbeddingOptions(normalize=False, dimensions=WIDTH)
    call = TokenizedCall((3,), 0, options, far_deadline())
    ids = item(5, 3).ids.tobytes()
    outcomes = await harness.replica.infer(TokenizedBatch(key, 32 * ids, 32 * (call,), 0.0))
    assert all(isinstance(outcome, CallResult) for outcome in outcomes)
    (loaded,) = harness.replica.pool.list_loaded()
    assert loaded.calls_per_minute == 32


async def test_model_stays_during_a_pass_whose_caller_left(harness: PoolHarness) -> None:
    await harness.infer(0)
    engine = GatedEngine()
    harness.replica._swap_engine(harness.refs[0], lambda: engine)
    leaving = asyncio.create_task(harness.infer(0))
    await wait_until(engine.started.is_set)
    leaving.cancel()
    other = asyncio.create_task(harness.infer(1))
    await asyncio.sleep(0.05)
    assert not engine.closed.is_set()
    assert not other.done()
    engine.gate.set()
    assert isinstance(await other, CallResult)
    assert engine.closed.is_set()


async def test_replaced_engine_is_closed_after_its_last_pass(
    harness: PoolHarness, tmp_path: Path
) -> None:
    ref, replica = harness.refs[0], harness.replica
    await harness.infer(0)
    target = replica._target(open_model(tmp_path, ref))
    former, tuned = GatedEngine(), GatedEngine()
    tuned.gate.set()
    await asyncio.to_thread(replica._use_tuning, ref, target, lambda: former)
    running = asyncio.create_task(harness.infer(0))
    await wait_until(former.started.is_set)
    await asyncio.to_thread(replica._use_tuning, ref, target, lambda: tuned)
    assert isinstance(await harness.infer(0), CallResult)
    assert tuned.started.is_set()
    assert not former.closed.is_set()
    former.gate.set()
    assert isinstance(await running, CallResult)
    await wait_until(former.closed.is_set)
    assert not tuned.closed.is_set()


@pytest.mark.parametrize("device", Device)
async def test_vocabulary_counts_where_it_is_in_memory(device: Device, tmp_path: Path) -> None:
    """A model on a GPU has its vocabulary in the memory of the host."""
    seal_token_model(tmp_path, FILL_MASK_MODEL, TaskName.FILL_MASK)
    version = tiny_manifest(FILL_MASK_MODEL).version
    model = open_model(tmp_path, ModelRef(FILL_MASK_MODEL, version))
    args = AppArgs(store=tmp_path, encoders={device: EncoderSettings(concurrent_passes=1)})
    replica = EncoderReplica(args, device, ListRecorder())
    async with replica.pool.lease(model.ref):
        pass
    engine = ENGINE_BYTES + count_arena_bytes(device, 1)
    vocabulary = measure_tokenizer(model.directory) if device is Device.CPU else 0
    graph = model.manifest.files[GRAPH_NAME].size
    assert replica.pool.bytes == graph + engine + vocabulary
    await replica.close()


async def test_broken_models_fail_alone_and_leave_no_memory(
    harness: PoolHarness, tmp_path: Path
) -> None:
    first, second = (tmp_path / ref.id.replace("/", "--") / ref.version for ref in harness.refs)
    replace_sealed_file(first, GRAPH_NAME, b"no graph")
    assert isinstance(await harness.infer(0), EngineFailed)
    assert harness.replica.pool.bytes == 0
    assert isinstance(await harness.infer(1), CallResult)
    assert await harness.replica.pool.unload(harness.refs[1])
    (second / GRAPH_NAME).write_bytes(b"changed")
    assert isinstance(await harness.infer(1), DigestMismatch)


async def test_model_with_a_graph_that_computes_nan_fails_its_probe(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, NAMES[0], nan_word="[PAD]")
    args = AppArgs(store=tmp_path, encoders={Device.CPU: EncoderSettings()})
    replica = EncoderReplica(args, Device.CPU, ListRecorder())
    with pytest.raises(EngineFailed, match="probe"):
        async with replica.pool.lease(ModelRef(NAMES[0], directory.name)):
            pass
    await replica.close()
