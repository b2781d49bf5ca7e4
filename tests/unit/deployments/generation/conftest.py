from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.config import SchedulingSettings
from tests.support.fake_decoder import FakeDecoder
from tests.support.loop_harness import LoopHarness


@pytest.fixture
def harnesses() -> Iterator[list[LoopHarness]]:
    made: list[LoopHarness] = []
    yield made
    for harness in made:
        if harness.decoder.held is not None:
            harness.decoder.held.set()
        harness.loop.close()


@pytest.fixture
def make_harness(harnesses: list[LoopHarness]):
    def make(decoder: FakeDecoder | None = None, **rules: float) -> LoopHarness:
        settings = {
            "max_prefill_chunk_tokens": 16,
            "min_prefill_chunk_tokens": 4,
            "max_prefill_stall_ms": 20.0,
        } | rules
        harness = LoopHarness(decoder or FakeDecoder(), SchedulingSettings(**settings))
        harnesses.append(harness)
        harness.loop.start()
        return harness

    return make
