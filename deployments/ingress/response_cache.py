"""Response cache, bounded in bytes and age. Concurrent misses of a key share one computation."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import orjson

from deployments.config import CacheSettings
from deployments.deadlines import enforce_deadline, is_expired
from deployments.errors import DeadlineExceeded, Overloaded, forget_frames
from deployments.messages import BatchKey, CallResult
from deployments.tasks import TaskInput

V = TypeVar("V")

# Bytes of an entry besides the contents of key and value: key tuple, dict slot, entry object.
ENTRY_OVERHEAD_BYTES = 400
# Bytes of a string without its characters: the object and its slot in a tuple.
STRING_BYTES = 60
# Bytes of an array without its values: the object, its shape, its slot in a list, and half of the
# dict of a sparse vector.
ARRAY_BYTES = 200


@dataclass(slots=True)
class _CachedResponse(Generic[V]):
    value: V
    size: int
    expires_s: float


@dataclass(slots=True)
class _SharedComputation(Generic[V]):
    task: asyncio.Task[V]
    waiters: int


class ResponseCache(Generic[V]):
    """LRU cache of values. It does not cache exceptions.

    `size_of` returns the bytes of a key and its value. Use the cache from one event loop only.
    """

    def __init__(
        self,
        settings: CacheSettings,
        size_of: Callable[[Any, V], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.bytes = 0
        self._size_of = size_of
        self._clock = clock
        self._entries: OrderedDict[Hashable, _CachedResponse[V]] = OrderedDict()
        self._in_flight: dict[Hashable, _SharedComputation[V]] = {}

    def configure(self, settings: CacheSettings) -> None:
        """Apply new settings; evict entries beyond `max_bytes`. Entries keep their expiry time."""
        self.settings = settings
        self._evict()

    def get(self, key: Hashable) -> V | None:
        """Return the cached value; None if it is absent or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() >= entry.expires_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: Hashable, value: V) -> None:
        """Drop the former value of `key`. Cache `value` if its entry fits into `max_bytes`."""
        if key in self._entries:
            self._remove(key)
        size = self._size_of(key, value) + ENTRY_OVERHEAD_BYTES
        if size > self.settings.max_bytes:
            return
        self._entries[key] = _CachedResponse(value, size, self._clock() + self.settings.ttl_s)
        self.bytes += size
        self._evict()

    async def compute_once(
        self,
        key: Hashable,
        compute: Callable[[], Coroutine[Any, Any, V]],
        deadline_s: float,
        *,
        variant: Hashable = None,
    ) -> V:
        """Await `compute()` and cache its value; concurrent callers share one computation.

        Callers share a computation if both `key` and `variant` are equal. `compute` must itself end
        at the deadline of the caller that started it. A later caller waits until its own deadline.
        If the shared computation fails earlier with DeadlineExceeded or Overloaded, the later
        caller tries again. After Overloaded it tries only once more: otherwise many callers would
        repeat a refused computation one after another. A computation is cancelled when its last
        caller stops waiting.
        """
        flight_key = (key, variant)
        was_refused = False
        while (flight := self._in_flight.get(flight_key)) is not None:
            try:
                async with enforce_deadline(deadline_s, "the request exceeded its deadline"):
                    return await self._join(flight_key, flight)
            except (DeadlineExceeded, Overloaded) as error:
                if was_refused or is_expired(deadline_s):
                    raise
                was_refused = isinstance(error, Overloaded)
                forget_frames(error)
        task = asyncio.ensure_future(self._compute(key, flight_key, compute()))
        flight = _SharedComputation(task, waiters=0)
        self._in_flight[flight_key] = flight
        return await self._join(flight_key, flight)

    async def _join(self, flight_key: Hashable, flight: _SharedComputation[V]) -> V:
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._in_flight.pop(flight_key, None)
                flight.task.cancel()

    async def _compute(self, key: Hashable, flight_key: Hashable, computation: Awaitable[V]) -> V:
        try:
            value = await computation
            self.put(key, value)
            return value
        finally:
            self._end_flight(flight_key)

    def _end_flight(self, flight_key: Hashable) -> None:
        """Remove the computation that the current task runs, if it is in flight.

        This is no part of `_compute`, whose frame would then refer to its own task. After an error
        the task refers to the frame.
        """
        flight = self._in_flight.get(flight_key)
        if flight is not None and flight.task is asyncio.current_task():
            del self._in_flight[flight_key]

    def _evict(self) -> None:
        while self.bytes > self.settings.max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: Hashable) -> None:
        self.bytes -= self._entries.pop(key).size


def response_bytes(key: tuple[BatchKey, TaskInput, str], result: CallResult) -> int:
    """Estimate the bytes of a cached result and of its key.

    The strings in the task's options count too: a request may have many or long labels.
    """
    parsed = key[1]
    strings = (parsed.texts, parsed.fields, parsed.options)
    return _value_bytes(result.value) + _string_bytes(strings)


def _string_bytes(value: Any) -> int:
    """Sum the bytes of strings in nested tuples. A character takes at most 4 bytes."""
    if isinstance(value, str):
        return STRING_BYTES + 4 * len(value)
    return sum(map(_string_bytes, value)) if isinstance(value, tuple) else 0


def _value_bytes(value: Any) -> int:
    parts = value if isinstance(value, list) else [value]
    named = [part.values() if isinstance(part, dict) else [part] for part in parts]
    arrays = [array for part in named for array in part]
    if all(isinstance(array, np.ndarray) for array in arrays):
        return sum(ARRAY_BYTES + array.nbytes for array in arrays)
    return 4 * len(orjson.dumps(value))
