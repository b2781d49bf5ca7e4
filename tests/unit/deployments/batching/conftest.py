from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from deployments.batching.scheduler import BatchScheduler
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from tests.support.fakes import FakeEngine, ListRecorder

MODEL = ModelRef("fake/model", "0123456789ab")
OTHER = ModelRef("fake/other", "0123456789ab")

MakeLoop = Callable[..., BatchScheduler]


@pytest.fixture
async def make_loop() -> AsyncIterator[MakeLoop]:
    """Loops over fake engines; at the end every engine is released and every loop drained."""
    made: list[tuple[BatchScheduler, FakeEngine]] = []

    def make(engine: FakeEngine, *, runs: int = 1, max_waiting_items: int = 100) -> BatchScheduler:
        rules = BatchSettings(max_waiting_items=max_waiting_items, pass_overhead_tokens=1_000)
        loop = BatchScheduler(
            {MODEL: engine, OTHER: engine}, rules, concurrent_passes=runs, recorder=ListRecorder()
        )
        made.append((loop, engine))
        return loop

    yield make
    for loop, engine in made:
        engine.release()
        await loop.drain()
