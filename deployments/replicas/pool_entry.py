"""State of the models of a pool: those that are loaded, and those that are being loaded."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from deployments.errors import ServeError
from deployments.replicas.call_rate import CallRate

T = TypeVar("T")


class PoolEntry(Generic[T]):
    __slots__ = ("leases", "loaded_s", "model", "rate", "size", "used_s")

    def __init__(self, model: T, size: int, now_s: float) -> None:
        self.model = model
        self.size = size
        self.leases = 0
        self.loaded_s = self.used_s = now_s
        self.rate = CallRate(now_s)


class PoolLoad:
    """A load and the number of calls that wait for it."""

    task: asyncio.Task[ServeError | None]

    def __init__(self) -> None:
        self.waiters = 0
        self.is_done = False  # True: each waiting call has a lease
