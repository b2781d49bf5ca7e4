from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.batching.batch_policy import collate
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.tuning.costs import Variant
from deployments.tuning.opening import ShapeDispatchEngine
from tests.support.cost_tables import shape, variant
from tests.support.fakes import FakeEngine, item

SMALL, LARGE = variant("small"), variant("large")
WINNERS = ((shape("1x4"), SMALL), (shape("8x64"), LARGE))


class ClosableEngine(FakeEngine):
    closed = False

    def close(self) -> None:
        self.closed = True


def batch(items: int, tokens: int) -> Batch:
    return collate([item(7, tokens)] * items)


@pytest.fixture
def engines() -> dict[Variant, ClosableEngine]:
    return {SMALL: ClosableEngine(), LARGE: ClosableEngine()}


def test_batch_runs_on_the_winner_of_its_shape(engines: dict[Variant, ClosableEngine]) -> None:
    engine = ShapeDispatchEngine(WINNERS, engines)
    for items, tokens in ((1, 1), (2, 5), (8, 60), (30, 100), (1, 4)):
        outputs: Outputs = engine.run(batch(items, tokens))
        assert [float(row[0]) for row in outputs.items] == [7.0] * items
    assert [len(markers) for markers in engines[SMALL].passes] == [1, 2, 1]
    assert [len(markers) for markers in engines[LARGE].passes] == [8, 30]


def test_info_is_that_of_its_engines(engines: dict[Variant, ClosableEngine]) -> None:
    assert ShapeDispatchEngine(WINNERS, engines).info == EngineInfo(compute_type="cpu-fake")


def test_unpooled_batch_runs_on_an_engine_that_supports_it(
    engines: dict[Variant, ClosableEngine],
) -> None:
    engines[LARGE].info = EngineInfo("cpu-fake", supports_unpooled=True)
    engine = ShapeDispatchEngine(WINNERS, engines)
    assert engine.info.supports_unpooled
    engine.run(replace(batch(1, 1), unpooled=True))
    engine.run(replace(batch(30, 100), unpooled=True))
    assert [len(markers) for markers in engines[LARGE].passes] == [1, 30]
    assert engines[SMALL].passes == []


def test_close_closes_all_engines(engines: dict[Variant, ClosableEngine]) -> None:
    ShapeDispatchEngine(WINNERS, engines).close()
    assert all(engine.closed for engine in engines.values())


def test_two_precisions_raise_assertion_error(engines: dict[Variant, ClosableEngine]) -> None:
    engines[LARGE].info = EngineInfo(compute_type="cpu-int8")
    with pytest.raises(AssertionError, match="bug: "):
        ShapeDispatchEngine(WINNERS, engines)
