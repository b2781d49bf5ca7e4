from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.errors import ArtifactMissing, EngineFailed, ModelUnavailable, ServeError
from deployments.health import MAX_QUARANTINE_S, MIN_QUARANTINE_S
from deployments.messages import ModelRef
from deployments.registry import RegisteredModel
from deployments.replicas import model_evictor, model_pool
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.model_pool import ModelLoader, ModelPool
from tests.support.artifacts import seal_tiny
from tests.support.fakes import TIMEOUT_S, FakeClock, PanicException, wait_until
from tests.support.loop_clock import LoopClock

NAMES = [f"tiny/model{number}" for number in range(6)]
SIZE = 10
ROOM_FOR = 3  # models that fit into the pool


class FakeLoader:
    """A loader that returns the id as the loaded model. A load waits until `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.loaded: list[str] = []
        self.closed: list[str] = []
        self.running = 0
        self.failures: dict[str, BaseException] = {}
        self.sizes: dict[str, int] = {}

    def measure(self, model: RegisteredModel) -> int:
        return self.sizes.get(model.ref.id, SIZE)

    def load(self, model: RegisteredModel) -> str:
        self.running += 1
        self.loaded.append(model.ref.id)
        assert self.gate.wait(TIMEOUT_S)
        self.running -= 1
        if model.ref.id in self.failures:
            raise self.failures[model.ref.id]
        return model.ref.id

    def close(self, ref: ModelRef, model: str) -> None:
        assert ref.id == model
        self.closed.append(model)


class Harness:
    def __init__(self, store: Path) -> None:
        self.store = store
        self.refs = [ModelRef(name, seal_tiny(store, name).name) for name in NAMES]
        self.loader, self.clock = FakeLoader(), FakeClock()
        self.pinned: set[ModelRef] = set()
        self.pool = self.open_pool(ROOM_FOR * SIZE)

    def open_pool(
        self, max_bytes: int | None, device_memory: DeviceMemory | None = None
    ) -> ModelPool[str]:
        loader = ModelLoader(self.loader.measure, self.loader.load, self.loader.close)
        return ModelPool(
            self.store, loader, max_bytes, lambda: self.pinned, self.clock, device_memory
        )

    async def use(self, *numbers: int) -> None:
        for number in numbers:
            async with self.pool.lease(self.refs[number]) as model:
                assert model == NAMES[number]

    def present(self) -> list[int]:
        return [number for number, ref in enumerate(self.refs) if ref in self.pool]


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(model_evictor, "ROOM_WAIT_S", TIMEOUT_S)
    harness = Harness(tmp_path)
    yield harness
    harness.loader.gate.set()
    await harness.pool.close()
    assert harness.pool.bytes == 0
    done = [name for name in harness.loader.loaded if name not in harness.loader.failures]
    assert sorted(harness.loader.closed) == sorted(done), "each model is closed once"


async def test_least_recently_used_model_goes(harness: Harness) -> None:
    await harness.use(0, 1, 2, 0, 3)
    assert harness.present() == [0, 2, 3]
    assert harness.pool.bytes == ROOM_FOR * SIZE
    await harness.use(1)
    assert harness.present() == [0, 1, 3]


async def test_many_calls_wait_for_one_load(harness: Harness) -> None:
    harness.loader.gate.clear()
    calls = [asyncio.create_task(harness.use(0)) for _ in range(20)]
    await wait_until(lambda: harness.loader.running == 1)
    harness.loader.gate.set()
    await asyncio.gather(*calls)
    assert harness.loader.loaded == [NAMES[0]]


async def test_different_models_load_at_the_same_time(harness: Harness) -> None:
    harness.loader.gate.clear()
    calls = [asyncio.create_task(harness.use(number)) for number in range(2)]
    await wait_until(lambda: harness.loader.running == 2)
    harness.loader.gate.set()
    await asyncio.gather(*calls)


async def test_freed_memory_is_returned_after_each_load_and_close(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    loader = harness.loader
    monkeypatch.setattr(
        model_pool,
        "return_free_memory",
        lambda: seen.append((len(loader.loaded), len(loader.closed))),
    )
    harness.pool.load_now(harness.refs[0])
    await harness.use(1)
    await harness.pool.unload(harness.refs[0])
    assert seen == [(1, 0), (2, 0), (2, 1)]


async def test_failed_close_does_not_fail_the_next_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness, closing = Harness(tmp_path), threading.Event()

    def fail(ref: ModelRef, model: str) -> None:
        assert closing.wait(TIMEOUT_S)
        raise EngineFailed("the engine does not close")

    pool = ModelPool(
        tmp_path, ModelLoader(harness.loader.measure, harness.loader.load, fail), ROOM_FOR * SIZE
    )
    async with pool.lease(harness.refs[0]):
        pass
    unload = asyncio.create_task(pool.unload(harness.refs[0]))
    await asyncio.sleep(0)
    load = asyncio.create_task(pool.load_and_lease(harness.refs[0]))
    for _ in range(5):  # the load waits for the close
        await asyncio.sleep(0)
    closing.set()
    assert await unload
    assert await load == NAMES[0]
    await pool.close()
    assert "failed to close" in caplog.text


async def test_leased_and_pinned_models_stay(harness: Harness) -> None:
    harness.pinned = {harness.refs[0]}
    async with harness.pool.lease(harness.refs[1]):
        await harness.use(0, 2, 3, 4, 5)
        assert harness.present() == [0, 1, 5]
    await harness.use(2)
    assert 0 in harness.present()


async def test_held_model_stays_although_its_callers_left(harness: Harness) -> None:
    async with harness.pool.lease(harness.refs[0]):
        harness.pool.hold(harness.refs[0])
    await harness.use(1, 2, 3, 4)
    assert 0 in harness.present()
    harness.pool.release(harness.refs[0])
    await harness.use(5, 1)
    assert 0 not in harness.present()


async def test_load_waits_for_the_end_of_a_lease(harness: Harness) -> None:
    leases = [harness.pool.lease(ref) for ref in harness.refs[:ROOM_FOR]]
    for lease in leases:
        await lease.__aenter__()
    waiting = asyncio.create_task(harness.use(3))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await leases[1].__aexit__(None, None, None)
    await waiting
    assert harness.present() == [0, 2, 3]
    for lease in (leases[0], leases[2]):
        await lease.__aexit__(None, None, None)


async def test_full_pool_of_leased_models_sends_calls_elsewhere(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_evictor, "ROOM_WAIT_S", 0.01)
    leases = [harness.pool.lease(ref) for ref in harness.refs[:ROOM_FOR]]
    for lease in leases:
        await lease.__aenter__()
    with pytest.raises(ModelUnavailable, match="pool_bytes") as raised:
        await harness.use(3)
    assert raised.value.elsewhere
    for lease in leases:
        await lease.__aexit__(None, None, None)
    await harness.use(3)  # at once: a full pool, unlike a failed load, causes no quarantine


async def test_model_larger_than_the_pool_evicts_nothing(harness: Harness) -> None:
    await harness.use(0, 1)
    harness.loader.sizes[NAMES[2]] = ROOM_FOR * SIZE + 1
    with pytest.raises(ModelUnavailable, match="pool_bytes"):
        await harness.use(2)
    assert harness.present() == [0, 1]


async def test_model_without_room_evicts_nothing_and_lets_others_load(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LoopClock(monkeypatch)
    harness.loader.sizes[NAMES[2]] = ROOM_FOR * SIZE
    await harness.use(1)
    async with harness.pool.lease(harness.refs[0]):
        waiting = asyncio.create_task(harness.use(2))
        await asyncio.sleep(0.01)
        await harness.use(3)
        assert not waiting.done(), "the other load does not wait for this one"
        await clock.advance(0)  # it looks again for room
        await clock.advance(TIMEOUT_S)
        with pytest.raises(ModelUnavailable, match="pool_bytes"):
            await waiting
        assert harness.present() == [0, 1, 3]
    await harness.use(2)
    assert harness.present() == [2]


def share_device(harness: Harness, tmp_path: Path) -> DeviceMemory:
    """Let the pool share a device that has memory for two models.

    Return the DeviceMemory with which another replica claims memory of this device.
    """
    directory, limit = tmp_path / "gpu", 2 * SIZE
    harness.pool = harness.open_pool(None, DeviceMemory(directory, limit))
    return DeviceMemory(directory, limit)


async def test_models_of_another_replica_leave_less_room(harness: Harness, tmp_path: Path) -> None:
    other = share_device(harness, tmp_path)
    await harness.use(0, 1, 2)
    assert harness.present() == [1, 2]
    await harness.pool.unload(harness.refs[1])
    assert other.claim(SIZE)
    await harness.use(3)
    assert harness.present() == [3]
    harness.pinned = {harness.refs[3]}
    with pytest.raises(
        ModelUnavailable,
        match=f"needs {SIZE} bytes .* `gpu_memory` allows {2 * SIZE}, of which 0 are available",
    ):
        await harness.use(0)
    other.close()
    await harness.use(0)


async def test_device_bounds_pinned_models_too(harness: Harness, tmp_path: Path) -> None:
    other = share_device(harness, tmp_path)
    assert other.claim(SIZE + 1)
    harness.pinned = {harness.refs[0]}
    with pytest.raises(ModelUnavailable, match="`gpu_memory`"):
        harness.pool.load_now(harness.refs[0])
    with pytest.raises(ModelUnavailable, match="`gpu_memory`"):
        await harness.use(0)
    other.close()
    harness.pool.load_now(harness.refs[0])
    assert harness.pool.bytes == SIZE


async def test_failed_load_gives_its_memory_back(harness: Harness, tmp_path: Path) -> None:
    other = share_device(harness, tmp_path)
    harness.loader.failures[NAMES[0]] = EngineFailed("no graph")
    with pytest.raises(EngineFailed):
        harness.pool.load_now(harness.refs[0])
    with pytest.raises(EngineFailed):
        await harness.use(0)
    assert other.claim(2 * SIZE)
    other.close()


async def test_panic_of_a_load_is_a_failed_load(harness: Harness) -> None:
    harness.loader.failures[NAMES[0]] = PanicException("the file of a model")
    for load in (harness.use(0), asyncio.to_thread(harness.pool.load_now, harness.refs[0])):
        with pytest.raises(EngineFailed):
            await load
        assert harness.pool.bytes == 0
    await harness.use(1)


async def test_failed_load_is_remembered_longer_each_time(harness: Harness) -> None:
    harness.loader.failures[NAMES[0]] = EngineFailed("no graph")
    wait_s = MIN_QUARANTINE_S
    for tries in range(1, 9):
        waiters = await asyncio.gather(harness.use(0), harness.use(0), return_exceptions=True)
        with pytest.raises(EngineFailed, match="no graph") as raised:
            await harness.use(0)
        errors = [*waiters, raised.value]
        assert len({id(error) for error in errors}) == 3, "a shared one collects tracebacks"
        assert all(isinstance(error, EngineFailed) and error.elsewhere for error in errors)
        assert len(harness.loader.loaded) == tries
        harness.clock.now_s += wait_s
        wait_s = min(2 * wait_s, MAX_QUARANTINE_S)
    del harness.loader.failures[NAMES[0]]
    harness.loader.loaded.clear()
    await harness.use(0)
    assert harness.pool.bytes == SIZE


async def test_unexpected_failure_hides_its_details(harness: Harness) -> None:
    harness.loader.failures[NAMES[0]] = RuntimeError("/secret/path")
    with pytest.raises(ServeError) as raised:
        await harness.use(0)
    assert "secret" not in raised.value.message


async def test_missing_version_is_an_error_of_the_call(harness: Harness) -> None:
    with pytest.raises(ArtifactMissing):
        async with harness.pool.lease(ModelRef(NAMES[0], "0" * 12)):
            pass
    assert harness.pool.bytes == 0


async def test_cancelled_waiters_leave_no_lease(harness: Harness) -> None:
    harness.loader.gate.clear()
    calls = [asyncio.create_task(harness.use(0)) for _ in range(3)]
    await wait_until(lambda: harness.loader.running == 1)
    calls[0].cancel()
    calls[1].cancel()
    harness.loader.gate.set()
    await calls[2]
    await harness.use(1, 2, 3)
    assert 0 not in harness.present(), "no call leases it any more"


async def test_waiter_cancelled_at_the_end_of_the_load_leaves_no_lease(harness: Harness) -> None:
    harness.loader.gate.clear()
    call = asyncio.create_task(harness.use(0))
    await wait_until(lambda: harness.loader.running == 1)
    harness.pool.on_change = lambda _ref, is_loaded: is_loaded and call.cancel()
    harness.loader.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [loaded.leases for loaded in harness.pool.list_loaded()] == [0]


async def test_random_uses_keep_the_bound_and_the_counts(harness: Harness) -> None:
    async def use_often(seed: int) -> None:
        for step in range(40):
            async with harness.pool.lease(harness.refs[(seed * 7 + step * step) % 6]):
                assert harness.pool.bytes <= ROOM_FOR * SIZE
                await asyncio.sleep(0)

    await asyncio.gather(*(use_often(seed) for seed in range(ROOM_FOR)))
    assert all(loaded.leases == 0 for loaded in harness.pool.list_loaded())


async def test_pinned_models_load_beyond_the_bound(harness: Harness) -> None:
    harness.pinned = set(harness.refs[:5])
    harness.pool.keep(harness.pinned)
    await wait_until(lambda: len(harness.present()) == 5)
    assert harness.pool.bytes == 5 * SIZE


async def test_former_versions_of_a_pinned_model_leave_once_they_are_idle(harness: Harness) -> None:
    for ref in harness.refs[:5]:  # as if each were the next version of one pinned model
        harness.pinned = {ref}
        harness.pool.keep(harness.pinned)
        await wait_until(lambda ref=ref: ref in harness.pool)
        await harness.use(0)
        await harness.pool.trim()
    assert harness.present() == [0, 1, 2, 3, 4], "the ingress may still send requests to them"
    harness.clock.now_s += model_evictor.RECENT_USE_S
    await harness.use(0)
    async with harness.pool.lease(harness.refs[1]):
        await harness.pool.trim()
    assert harness.present() == [0, 1, 4], "the others are used or pinned"


async def test_changes_and_facts_are_reported(harness: Harness) -> None:
    changes: list[tuple[str, bool]] = []
    harness.pool.on_change = lambda ref, is_loaded: changes.append((ref.id, is_loaded))
    harness.pinned = {harness.refs[1]}
    await harness.use(0, 1, 2)
    harness.clock.now_s += 5
    await harness.use(1)
    (first, second, third) = harness.pool.list_loaded()
    assert (first.ref.id, first.idle_s, first.age_s, first.is_pinned) == (NAMES[0], 5, 5, False)
    assert (third.ref.id, third.idle_s, third.is_pinned) == (NAMES[1], 0, True)
    assert second.bytes == SIZE
    assert await harness.pool.unload(harness.refs[2])
    assert not await harness.pool.unload(harness.refs[2])
    async with harness.pool.lease(harness.refs[0]):
        assert not await harness.pool.unload(harness.refs[0]), "it is in use"
    assert changes == [(NAMES[0], True), (NAMES[1], True), (NAMES[2], True), (NAMES[2], False)]
