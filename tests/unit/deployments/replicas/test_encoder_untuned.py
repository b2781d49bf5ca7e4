"""Tests of models without cost tables: what a replica measures, and its use of new tables."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.batching.prices import guess_item_s
from deployments.batching.replica_hooks import LonePass
from deployments.config import AppArgs, EncoderSettings
from deployments.engines import EncoderEngine
from deployments.errors import EngineFailed, ModelUnavailable
from deployments.messages import ModelRef
from deployments.registry import open_model
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.encoder import EncoderReplica
from deployments.tuning.costs import TuningTarget
from tests.support.artifacts import GRAPH_NAME
from tests.support.cost_tables import row, variant
from tests.support.fakes import TIMEOUT_S, FakeEngine, ListRecorder, wait_until
from tests.support.tuning_artifacts import SLOW_GRAPH_NAME, seal_tunable, write_table

CORES = 2
TOKENS = 16


class UntunedReplica:
    """An encoder replica on a host with two cores, and a model that is not in its configuration."""

    def __init__(
        self, store: Path, lone_pass_bytes: int = 1 << 20, names: Sequence[str] = ("plain", "twin")
    ) -> None:
        settings = EncoderSettings(lone_pass_bytes=lone_pass_bytes)
        self.target = seal_tunable(store, names=names, settings=settings)
        self.ref = ModelRef(self.target.manifest.id, self.target.manifest.version)
        args = AppArgs(store=store, encoders={Device.CPU: settings})
        self.replica = EncoderReplica(args, Device.CPU, ListRecorder())

    async def load(self) -> None:
        async with self.replica.pool.lease(self.ref):
            pass

    def unmeasured_threads(self) -> list[int]:
        return [
            target.settings.intra_op_threads
            for _, untuned in self.replica._list_untuned()
            for target in untuned.unmeasured
        ]

    def write_table(self, threads: int, ms: float, winner: str = "plain") -> TuningTarget:
        settings = self.target.settings.model_copy(update={"intra_op_threads": threads})
        target = replace(self.target, settings=settings)
        medians_ms = {f"1x{TOKENS}": ms, f"32x{TOKENS}": 32 * ms}
        rows = (row(winner, medians_ms, "fp32"),)
        write_table(target, dict.fromkeys(medians_ms, winner), rows=rows)
        return target

    def price_s(self) -> float:
        return self.replica._prices.estimate_s(self.ref, TOKENS)

    def plan(self) -> LonePass:
        return self.replica._lone_passes.plan(self.ref, 1, TOKENS)

    async def use_tuning(self, open_new: Callable[[], EncoderEngine] | None) -> None:
        """Use new tables from another thread, as the tuner does."""
        await asyncio.to_thread(self.replica._use_tuning, self.ref, self.target, open_new)


class SlowlyClosedEngine(FakeEngine):
    """An engine whose close waits for `may_close`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing, self.may_close = threading.Event(), threading.Event()

    def close(self) -> None:
        self.is_closing.set()
        assert self.may_close.wait(TIMEOUT_S)


def fail_to_open() -> EncoderEngine:
    raise EngineFailed("out of memory")


@pytest.fixture
async def untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UntunedReplica]:
    monkeypatch.setattr("deployments.replicas.encoder.usable_cores", lambda: CORES)
    untuned = UntunedReplica(tmp_path)
    yield untuned
    await untuned.replica.close()


async def test_one_thread_and_all_cores_are_to_be_measured(untuned: UntunedReplica) -> None:
    assert untuned.unmeasured_threads() == []
    await untuned.load()
    assert untuned.unmeasured_threads() == [1, CORES]


async def test_only_all_cores_are_measured_of_a_model_with_a_table_of_one_thread(
    untuned: UntunedReplica,
) -> None:
    untuned.write_table(1, 4.0)
    await untuned.load()
    assert untuned.unmeasured_threads() == [CORES]


async def test_measured_model_is_not_listed(untuned: UntunedReplica) -> None:
    untuned.write_table(1, 4.0)
    untuned.write_table(CORES, 2.0)
    await untuned.load()
    assert untuned.replica._list_untuned() == []


async def test_one_thread_suffices_without_memory_for_second_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.usable_cores", lambda: CORES)
    untuned = UntunedReplica(tmp_path, lone_pass_bytes=0)
    await untuned.load()
    assert untuned.unmeasured_threads() == [1]
    await untuned.replica.close()


async def test_serving_variant_is_that_of_a_similar_host(untuned: UntunedReplica) -> None:
    own = untuned.target.host
    elsewhere = own.model_copy(update={"name": "another", "cores": own.cores + 1})
    write_table(untuned.target, {f"1x{TOKENS}": "twin"}, host=elsewhere)
    await untuned.load()
    ((_, listed),) = untuned.replica._list_untuned()
    assert listed.serving == variant("twin")
    assert len(listed.unmeasured) == 2


async def test_new_tables_replace_guesses_and_plan_lone_passes(untuned: UntunedReplica) -> None:
    await untuned.load()
    assert untuned.price_s() == guess_item_s(untuned.ref, TOKENS)
    assert untuned.plan() == LonePass()
    untuned.replica._scheduler.prices.record(untuned.ref, 1.0, 5.0)
    untuned.write_table(1, 4.0)
    untuned.write_table(CORES, 2.0)
    await untuned.use_tuning(None)
    assert untuned.price_s() == pytest.approx(0.004)
    assert untuned.plan().is_brief
    assert untuned.replica._scheduler.prices.passes[untuned.ref] == 0, "the count restarts"


async def test_new_tables_of_an_evicted_model_are_not_kept(untuned: UntunedReplica) -> None:
    await untuned.load()
    untuned.write_table(1, 4.0)
    assert await untuned.replica.pool.unload(untuned.ref)
    await untuned.use_tuning(fail_to_open)
    assert untuned.price_s() == guess_item_s(untuned.ref, TOKENS)
    assert untuned.plan() == LonePass()
    assert untuned.replica._engines == {}


@pytest.mark.parametrize("names", [("plain", "slow"), ("slow", "plain")])
async def test_counted_bytes_are_those_of_the_engine_that_tuning_selects(
    names: tuple[str, str], tmp_path: Path
) -> None:
    untuned = UntunedReplica(tmp_path, names=names)
    sealed = untuned.target.manifest.files
    sizes = {"plain": sealed[GRAPH_NAME].size, "slow": sealed[SLOW_GRAPH_NAME].size}
    await untuned.load()
    pool = untuned.replica.pool
    before = pool.bytes
    untuned.write_table(1, 4.0, winner=names[1])
    counted = []

    def open_new() -> EncoderEngine:
        counted.append(pool.bytes)
        return FakeEngine()

    await untuned.use_tuning(open_new)
    assert counted == [before + pool.bytes], "both engines count while both are open"
    assert pool.bytes - before == sizes[names[1]] - sizes[names[0]]
    assert pool.list_loaded()[0].bytes == pool.bytes
    await untuned.replica.close()
    assert pool.bytes == 0


async def test_engine_and_prices_stay_if_the_device_lacks_memory_for_the_tuned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(tmp_path / "gpu", 0)
    monkeypatch.setattr("deployments.replicas.encoder.open_device_memory", lambda *_: memory)
    untuned = UntunedReplica(tmp_path, names=("plain", "slow"))
    pool = untuned.replica.pool
    size = untuned.replica._measure(open_model(tmp_path, untuned.ref))
    added = untuned.target.manifest.files[SLOW_GRAPH_NAME].size
    memory.limit = size + added
    await untuned.load()
    engine = untuned.replica._engines[untuned.ref]
    untuned.write_table(1, 4.0, winner="slow")
    with pytest.raises(ModelUnavailable, match=r"`gpu_memory` has no room for \d+ more bytes"):
        await untuned.use_tuning(fail_to_open)
    assert untuned.replica._engines[untuned.ref] is engine
    assert untuned.price_s() == guess_item_s(untuned.ref, TOKENS)
    assert pool.bytes == size
    await untuned.replica.close()


async def test_engine_prices_and_bytes_stay_if_the_tuned_engine_cannot_be_opened(
    untuned: UntunedReplica,
) -> None:
    await untuned.load()
    engine, before = untuned.replica._engines[untuned.ref], untuned.replica.pool.bytes
    untuned.write_table(1, 4.0, winner="twin")
    with pytest.raises(EngineFailed, match="out of memory"):
        await untuned.use_tuning(fail_to_open)
    assert untuned.replica._engines[untuned.ref] is engine
    assert untuned.price_s() == guess_item_s(untuned.ref, TOKENS)
    assert untuned.replica.pool.bytes == before
    assert await untuned.replica.pool.unload(untuned.ref), "the lease has ended"
    assert untuned.replica.pool.bytes == 0


async def test_only_other_models_are_evicted_while_an_engine_is_replaced(
    untuned: UntunedReplica, tmp_path: Path
) -> None:
    manifest = seal_tunable(tmp_path, "tiny/other").manifest
    other, pool = ModelRef(manifest.id, manifest.version), untuned.replica.pool
    await untuned.load()
    former = SlowlyClosedEngine()
    untuned.replica._swap_engine(untuned.ref, lambda: former)
    untuned.write_table(1, 4.0, winner="twin")
    using = asyncio.create_task(untuned.use_tuning(FakeEngine))
    await wait_until(former.is_closing.is_set)
    async with pool.lease(other):
        pass
    assert await pool.unload(other)
    assert other not in untuned.replica._engines, "its close waits for no other close"
    assert not await pool.unload(untuned.ref)
    former.may_close.set()
    await using
    assert await pool.unload(untuned.ref)
