"""Tests of pools with models that change their size, or whose close takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.errors import ModelUnavailable
from deployments.messages import ModelRef
from deployments.registry import RegisteredModel
from deployments.replicas import model_evictor
from deployments.replicas.device_memory import DeviceMemory
from deployments.replicas.model_pool import ModelLoader, ModelPool
from tests.support.artifacts import seal_tiny
from tests.support.fakes import TIMEOUT_S, wait_until

NAMES = ("tiny/first", "tiny/second")
SIZE, LIMIT = 10, 15  # bytes of a model, and of the pool


class OneModelPool:
    """A pool with room for one of two models. A close waits for `may_close`."""

    def __init__(self, directory: Path) -> None:
        self.refs = [ModelRef(name, seal_tiny(directory, name).name) for name in NAMES]
        self.may_close = threading.Event()
        self.may_close.set()
        memory = DeviceMemory(directory / "gpu", LIMIT)
        loader = ModelLoader(lambda _model: SIZE, self._load, self._close)
        self.pool = ModelPool(directory, loader, None, device_memory=memory)
        self.other_replica = DeviceMemory(directory / "gpu", LIMIT)

    def _load(self, model: RegisteredModel) -> str:
        return model.ref.id

    def _close(self, _ref: ModelRef, _model: str) -> None:
        assert self.may_close.wait(TIMEOUT_S)

    async def use(self, number: int) -> None:
        async with asyncio.timeout(TIMEOUT_S / 2), self.pool.lease(self.refs[number]):
            pass


@pytest.fixture
async def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OneModelPool]:
    monkeypatch.setattr(model_evictor, "ROOM_WAIT_S", TIMEOUT_S)
    one = OneModelPool(tmp_path)
    yield one
    one.may_close.set()
    await one.pool.close()
    assert one.pool.bytes == 0
    assert one.other_replica.claim(LIMIT), "the pool claims nothing on the device"
    one.other_replica.close()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_evictor, "CLOSE_WAIT_S", 0.01)
    monkeypatch.setattr(model_evictor, "ROOM_WAIT_S", 0.01)


async def test_model_is_visible_to_health_checks_until_it_is_closed(
    one: OneModelPool, short_waits: None
) -> None:
    await one.use(0)
    one.may_close.clear()
    assert await one.pool.unload(one.refs[0])
    assert one.pool.refs() == []
    assert list(one.pool.models()) == [NAMES[0]]
    assert one.pool.bytes == SIZE
    one.may_close.set()
    await wait_until(lambda: list(one.pool.models()) == [])
    assert one.pool.bytes == 0


async def test_loads_and_trims_do_not_wait_for_ever_for_a_close(
    one: OneModelPool, short_waits: None
) -> None:
    await one.use(0)
    one.may_close.clear()
    loads = await asyncio.gather(one.use(1), one.use(1), return_exceptions=True)
    assert [type(error) for error in loads] == [ModelUnavailable] * 2
    with pytest.raises(ModelUnavailable, match=f"{NAMES[1]} needs {SIZE} bytes .* Retry later"):
        await one.use(1)
    with pytest.raises(ModelUnavailable, match=f"{NAMES[0]} is still being closed. Retry later"):
        await one.use(0)
    await asyncio.wait_for(one.pool.trim(), TIMEOUT_S / 2)
    one.may_close.set()
    await wait_until(lambda: one.pool.bytes == 0)
    await one.use(1)


async def test_end_of_a_close_wakes_a_load_that_waits_for_room(one: OneModelPool) -> None:
    await one.use(0)
    one.may_close.clear()
    unload = asyncio.create_task(one.pool.unload(one.refs[0]))
    await wait_until(lambda: one.pool.refs() == [])
    waiting = asyncio.create_task(one.use(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    one.may_close.set()
    await asyncio.gather(unload, waiting)


async def test_former_and_new_size_count_until_the_model_has_its_new_size(
    one: OneModelPool,
) -> None:
    await one.use(0)
    async with one.pool.lease(one.refs[0]):
        with one.pool.resizing(one.refs[0], LIMIT - SIZE):
            assert one.pool.bytes == LIMIT
            assert not one.other_replica.claim(1)
        assert one.pool.list_loaded()[0].bytes == one.pool.bytes == LIMIT - SIZE
        assert one.other_replica.claim(SIZE)
        with (
            pytest.raises(ModelUnavailable, match="`gpu_memory` has no room for 1 more bytes"),
            one.pool.resizing(one.refs[0], 1),
        ):
            raise AssertionError("the other replica has the rest")
        assert one.pool.bytes == LIMIT - SIZE
    one.other_replica.release(SIZE)


async def test_failed_change_of_the_size_restores_the_former_size(one: OneModelPool) -> None:
    async with one.pool.lease(one.refs[0]):
        with pytest.raises(OSError, match="too large"), one.pool.resizing(one.refs[0], 1):
            raise OSError("too large")
        assert one.pool.list_loaded()[0].bytes == one.pool.bytes == SIZE
        assert one.other_replica.claim(LIMIT - SIZE)
    one.other_replica.release(LIMIT - SIZE)


async def test_smaller_size_makes_room_for_a_load_that_waits(one: OneModelPool) -> None:
    async with one.pool.lease(one.refs[0]):
        waiting = asyncio.create_task(one.use(1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        with one.pool.resizing(one.refs[0], LIMIT - SIZE):
            pass
        await waiting
