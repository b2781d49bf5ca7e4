"""State of the models of a pool: those that are loaded or being closed, and loads."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from deployments.errors import ServeError
from deployments.messages import LoadedModel, ModelRef
from deployments.replicas.call_rate import CallRate

T = TypeVar("T")


class PoolEntry(Generic[T]):
    __slots__ = ("closing", "leases", "loaded_s", "model", "rate", "size", "used_s")

    closing: asyncio.Task[None]  # set when the model is evicted

    def __init__(self, model: T, size: int, now_s: float) -> None:
        self.model = model
        self.size = size
        self.leases = 0
        self.loaded_s = self.used_s = now_s
        self.rate = CallRate(now_s)

    def describe(self, ref: ModelRef, now_s: float, *, is_pinned: bool) -> LoadedModel:
        return LoadedModel(
            ref=ref,
            bytes=self.size,
            is_pinned=is_pinned,
            leases=self.leases,
            calls_per_minute=self.rate.per_minute(now_s),
            age_s=now_s - self.loaded_s,
            idle_s=now_s - self.used_s,
        )


class PoolLoad:
    """A load and the number of calls that wait for it."""

    task: asyncio.Task[ServeError | None]

    def __init__(self) -> None:
        self.waiters = 0
        self.is_done = False  # True: each waiting call has a lease
