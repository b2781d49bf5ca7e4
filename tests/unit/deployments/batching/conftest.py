from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from deployments.batching.scheduler import BatchScheduler
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from tests.support.batch_schedulers import build_batch_scheduler
from tests.support.fakes import TIMEOUT_S, FakeEngine, ListRecorder

MODEL = ModelRef("fake/model", "0123456789ab")
OTHER = ModelRef("fake/other", "0123456789ab")

MakeScheduler = Callable[..., BatchScheduler]


@pytest.fixture
async def make_scheduler() -> AsyncIterator[MakeScheduler]:
    """Return a factory of schedulers over fake engines. Drain them after the test."""
    created: list[tuple[BatchScheduler, FakeEngine]] = []

    def make(
        engine: FakeEngine, *, passes: int = 1, max_waiting_items: int = 100
    ) -> BatchScheduler:
        settings = BatchSettings(max_waiting_items=max_waiting_items, pass_overhead_tokens=1_000)
        scheduler = build_batch_scheduler(
            {MODEL: engine, OTHER: engine},
            settings,
            concurrent_passes=passes,
            recorder=ListRecorder(),
        )
        created.append((scheduler, engine))
        return scheduler

    yield make
    for scheduler, engine in created:
        engine.release()
        async with asyncio.timeout(TIMEOUT_S):
            await scheduler.drain()
