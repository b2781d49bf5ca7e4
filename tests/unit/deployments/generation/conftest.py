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
    for bench in made:
        if bench.decoder.held is not None:
            bench.decoder.held.set()
        bench.loop.close()


@pytest.fixture
def make_bench(harnesses: list[LoopHarness]):
    def make(decoder: FakeDecoder | None = None, **rules: float) -> LoopHarness:
        settings = {
            "max_prefill_chunk_tokens": 16,
            "min_prefill_chunk_tokens": 4,
            "max_prefill_stall_ms": 20.0,
        } | rules
        bench = LoopHarness(decoder or FakeDecoder(), SchedulingSettings(**settings))
        harnesses.append(bench)
        bench.loop.start()
        return bench

    return make
