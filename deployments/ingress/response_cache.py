"""What an answer in the response cache occupies."""

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
from deployments.messages import BatchKey, CallResult
from deployments.tasks import TaskInput

V = TypeVar("V")

# What an entry costs besides its value: key tuple, dict slot, entry object.
ENTRY_OVERHEAD_BYTES = 400


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    size: int
    expires_s: float


@dataclass(slots=True)
class _InFlight(Generic[V]):
    task: asyncio.Task[V]
    waiters: int


class ResponseCache(Generic[V]):
    """Least recently used out first. Failures are never kept.

    `size_of` gives the bytes of a value and its key together. Use from one event loop.
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
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        self._flights: dict[Hashable, _InFlight[V]] = {}

    def configure(self, settings: CacheSettings) -> None:
        """Bound the cache anew; what no longer fits is dropped at once."""
        self.settings = settings
        self._evict()

    def get(self, key: Hashable) -> V | None:
        """The kept value, or None when there is none or it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() >= entry.expires_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: Hashable, value: V) -> None:
        """Keep `value`, unless it alone exceeds the bound."""
        size = self._size_of(key, value) + ENTRY_OVERHEAD_BYTES
        if size > self.settings.max_bytes:
            return
        if key in self._entries:
            self._drop(key)
        self._entries[key] = _Entry(value, size, self._clock() + self.settings.ttl_s)
        self.bytes += size
        self._evict()

    async def compute_once(
        self, key: Hashable, compute: Callable[[], Coroutine[Any, Any, V]], *, way: Hashable = None
    ) -> V:
        """`compute()`, shared with whoever asks for the same key meanwhile, then kept.

        Only those who compute it the same `way` share, for example with the same patience. When
        the last one waiting is cancelled the computation is cancelled too.
        """
        flight_key = (key, way)
        flight = self._flights.get(flight_key)
        if flight is None:
            task = asyncio.ensure_future(self._fly(key, flight_key, compute()))
            flight = _InFlight(task, waiters=0)
            self._flights[flight_key] = flight
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._flights.pop(flight_key, None)
                flight.task.cancel()

    async def _fly(self, key: Hashable, flight_key: Hashable, computation: Awaitable[V]) -> V:
        try:
            value = await computation
            self.put(key, value)
            return value
        finally:
            flight = self._flights.get(flight_key)
            if flight is not None and flight.task is asyncio.current_task():
                del self._flights[flight_key]

    def _evict(self) -> None:
        while self.bytes > self.settings.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        self.bytes -= self._entries.pop(key).size


# What a string costs besides its characters: the object, and its place in a tuple.
STRING_BYTES = 60


def response_bytes(key: tuple[BatchKey, TaskInput], answer: CallResult) -> int:
    """What a cached answer occupies: its value, and the words by which it is found.

    The words of the options count too: labels to ignore, for example, may be many or long.
    """
    parsed = key[1]
    words = (parsed.texts, parsed.fields, parsed.options)
    return _value_bytes(answer.value) + _word_bytes(words)


def _word_bytes(words: Any) -> int:
    """Of a string, or of all in a tuple; a character takes 4 bytes at most."""
    if isinstance(words, str):
        return STRING_BYTES + 4 * len(words)
    return sum(map(_word_bytes, words)) if isinstance(words, tuple) else 0


def _value_bytes(value: Any) -> int:
    arrays = value if isinstance(value, list) else [value]
    if all(isinstance(array, np.ndarray) for array in arrays):
        return sum(array.nbytes for array in arrays)
    return 4 * len(orjson.dumps(value))
