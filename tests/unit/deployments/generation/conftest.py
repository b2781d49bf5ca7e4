from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.config import SchedulingSettings
from tests.support.fake_decoder import FakeDecoder
from tests.support.loop_harness import Bench


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        if bench.decoder.held is not None:
            bench.decoder.held.set()
        bench.loop.close()


@pytest.fixture
def make_bench(benches: list[Bench]):
    def make(decoder: FakeDecoder | None = None, **rules: float) -> Bench:
        settings = {"part_tokens": 16, "fewest_part_tokens": 4, "stall_ms": 20.0} | rules
        bench = Bench(decoder or FakeDecoder(), SchedulingSettings(**settings))
        benches.append(bench)
        bench.loop.start()
        return bench

    return make
