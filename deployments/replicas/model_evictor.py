"""Eviction of models from the memory of a replica, for models that are to be loaded."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Generic, TypeVar

from deployments.health import HANG_TIMEOUT_S
from deployments.messages import ModelRef
from deployments.replicas.pool_entry import PoolEntry
from deployments.replicas.pool_memory import PoolMemory

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

# If leased models occupy the memory, a load waits this many seconds for their calls to end. Then
# the load fails, and the ingress tries another replica, which may have free memory.
ROOM_WAIT_S = 1.0
# An eviction waits this many seconds for the model to be closed. A step or pass that hangs keeps it
# open until the health check fails and Ray Serve replaces the replica.
CLOSE_WAIT_S = HANG_TIMEOUT_S
RECENT_USE_S = 30.0  # `trim` keeps models that were used within this time


class ModelEvictor(Generic[T]):
    """Evicts the idle models of a pool: those without a lease that are not pinned."""

    def __init__(
        self,
        entries: OrderedDict[ModelRef, PoolEntry[T]],
        memory: PoolMemory,
        pinned: Callable[[], Collection[ModelRef]],
        close: Callable[[ModelRef, T], Awaitable[None]],
        on_evict: Callable[[ModelRef], None],
        clock: Callable[[], float],
    ) -> None:
        """Evict from `entries`, the models of the pool, the least recently used first."""
        self._entries = entries
        self._memory = memory
        self._pinned = pinned
        self._close = close
        self._on_evict = on_evict
        self._clock = clock
        self._closing: dict[ModelRef, PoolEntry[T]] = {}
        self._room = asyncio.Lock()  # held while a load or `trim` evicts models
        self._released = asyncio.Event()

    def list_closing(self) -> list[T]:
        return [entry.model for entry in self._closing.values()]

    async def take(self, ref: ModelRef, size: int) -> None:
        """Take `size` bytes for `ref`; evict the least recently used models if needed.

        Raises ModelUnavailable at once if pinned models occupy too much, and after ROOM_WAIT_S if
        leased models do. Before each eviction it checks that evictions can free enough bytes.
        """
        pinned, memory = self._pinned(), self._memory
        staying = sum(e.size for each, e in self._entries.items() if each in pinned)
        if not memory.can_take(size, staying, is_pinned=ref in pinned):
            raise memory.build_refusal(ref, size)
        ends_s = self._clock() + ROOM_WAIT_S
        while not await self._try_to_take(ref, size, pinned):
            if not await self._wait_for_release(ends_s - self._clock()):
                raise memory.build_refusal(ref, size)

    async def _try_to_take(self, ref: ModelRef, size: int, pinned: Collection[ModelRef]) -> bool:
        """Take `size` bytes; evict idle models for them if that is enough, else return False."""
        memory = self._memory
        async with self._room:
            while not memory.take(size, is_pinned=ref in pinned):
                victims = self._list_idle(pinned)
                staying = memory.bytes - sum(self._entries[each].size for each in victims)
                if not victims or not memory.can_take(size, staying, is_pinned=ref in pinned):
                    return False
                await self._evict_idle(victims[0])
        return True

    async def _wait_for_release(self, timeout_s: float) -> bool:
        self._released.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._released.wait()
        return False

    def give_back(self, size: int) -> None:
        self._memory.give_back(size)
        self._released.set()

    def notice_release(self) -> None:
        """Let waiting loads look again: a model has lost its last lease."""
        self._released.set()

    async def trim(self) -> None:
        """Evict idle models that are not recently used, down to `max_bytes`."""
        async with self._room:
            for ref in self._list_idle(self._pinned()):
                if self._memory.has_room(0):
                    return
                entry = self._entries.get(ref)
                if entry is None or entry.leases or self._clock() - entry.used_s < RECENT_USE_S:
                    continue
                await self._evict_idle(ref)

    def _list_idle(self, pinned: Collection[ModelRef]) -> list[ModelRef]:
        """List the models that may be evicted, the least recently used first."""
        return [
            ref for ref, entry in self._entries.items() if not entry.leases and ref not in pinned
        ]

    async def _evict_idle(self, ref: ModelRef) -> None:
        await self.evict(ref)
        log.info("model %s evicted: %d bytes remain", ref.name, self._memory.bytes)

    async def evict_all(self) -> None:
        """Evict all models, and wait until all are closed."""
        while self._entries:  # others may evict models meanwhile
            await self.evict(next(iter(self._entries)))
        await asyncio.gather(*(entry.closing for entry in self._closing.values()))

    async def evict(self, ref: ModelRef) -> None:
        """Remove a model and close it. Wait up to CLOSE_WAIT_S for the end of the close."""
        entry = self._closing[ref] = self._entries.pop(ref)
        self._on_evict(ref)
        entry.closing = asyncio.create_task(self._close_entry(ref, entry))
        if not await self.wait_for_close(ref):
            log.error("model %s is not closed after %g s", ref.name, CLOSE_WAIT_S)

    async def wait_for_close(self, ref: ModelRef) -> bool:
        """Wait up to CLOSE_WAIT_S for a model that is being closed. Return whether it is closed."""
        if (entry := self._closing.get(ref)) is not None:
            await asyncio.wait([entry.closing], timeout=CLOSE_WAIT_S)
        return ref not in self._closing

    async def _close_entry(self, ref: ModelRef, entry: PoolEntry[T]) -> None:
        try:
            await self._close(ref, entry.model)
        except Exception as error:
            log.error("model %s failed to close", ref.name, exc_info=error)
        finally:
            del self._closing[ref]
            self.give_back(entry.size)
