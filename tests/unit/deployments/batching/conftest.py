from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from deployments.batching.scheduler import BatchLoop
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from tests.support.fakes import FakeEngine, ListRecorder

MODEL = ModelRef("fake/model", "0123456789ab")
OTHER = ModelRef("fake/other", "0123456789ab")

MakeLoop = Callable[..., BatchLoop]


@pytest.fixture
async def make_loop() -> AsyncIterator[MakeLoop]:
    """Loops over fake engines; at the end every engine is released and every loop drained."""
    made: list[tuple[BatchLoop, FakeEngine]] = []

    def make(engine: FakeEngine, *, runs: int = 1, queue_items: int = 100) -> BatchLoop:
        rules = BatchSettings(queue_items=queue_items, pass_cost_tokens=1_000)
        loop = BatchLoop({MODEL: engine, OTHER: engine}, rules, runs=runs, recorder=ListRecorder())
        made.append((loop, engine))
        return loop

    yield make
    for loop, engine in made:
        engine.release()
        await loop.drain()
