from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.config import SchedulingSettings
from tests.support.fake_decoder import FakeDecoder
from tests.support.scheduler_harness import SchedulerHarness


@pytest.fixture
def harnesses() -> Iterator[list[SchedulerHarness]]:
    made: list[SchedulerHarness] = []
    yield made
    for harness in made:
        if harness.decoder.held is not None:
            harness.decoder.held.set()
        harness.scheduler.close()


@pytest.fixture
def make_harness(harnesses: list[SchedulerHarness]):
    def make(decoder: FakeDecoder | None = None, **rules: float) -> SchedulerHarness:
        settings = {
            "max_prefill_chunk_tokens": 16,
            "min_prefill_chunk_tokens": 4,
            "max_prefill_stall_ms": 20.0,
        } | rules
        harness = SchedulerHarness(decoder or FakeDecoder(), SchedulingSettings(**settings))
        harnesses.append(harness)
        harness.scheduler.start()
        return harness

    return make
