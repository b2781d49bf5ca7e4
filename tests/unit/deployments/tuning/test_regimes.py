from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.batching.batches import collate
from deployments.engines.base import EngineInfo
from deployments.messages import Batch, Outputs
from deployments.tuning.costs import Variant
from deployments.tuning.opening import ShapeDispatchEngine
from tests.support.cost_tables import shape, variant
from tests.support.fakes import FakeEngine, item

SMALL, LARGE = variant("small"), variant("large")
WINNERS = ((shape("1x4"), SMALL), (shape("8x64"), LARGE))


class Closing(FakeEngine):
    """An engine that remembers that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def batch(items: int, tokens: int) -> Batch:
    return collate([item(7, tokens)] * items)


@pytest.fixture
def engines() -> dict[Variant, Closing]:
    return {SMALL: Closing(), LARGE: Closing()}


def test_each_batch_goes_to_the_winner_at_its_size(engines: dict[Variant, Closing]) -> None:
    engine = ShapeDispatchEngine(WINNERS, engines)
    for items, tokens in ((1, 1), (2, 5), (8, 60), (30, 100), (1, 4)):
        answered: Outputs = engine.run(batch(items, tokens))
        assert [float(row[0]) for row in answered.items] == [7.0] * items
    assert [len(markers) for markers in engines[SMALL].passes] == [1, 2, 1]
    assert [len(markers) for markers in engines[LARGE].passes] == [8, 30]


def test_it_says_what_its_engines_say(engines: dict[Variant, Closing]) -> None:
    assert ShapeDispatchEngine(WINNERS, engines).info == EngineInfo(compute_type="cpu-fake")


def test_tokens_are_asked_of_an_engine_that_gives_them(engines: dict[Variant, Closing]) -> None:
    engines[LARGE].info = EngineInfo("cpu-fake", supports_unpooled=True)
    engine = ShapeDispatchEngine(WINNERS, engines)
    assert engine.info.supports_unpooled
    engine.run(replace(batch(1, 1), unpooled=True))
    engine.run(replace(batch(30, 100), unpooled=True))
    assert [len(markers) for markers in engines[LARGE].passes] == [1, 30]
    assert engines[SMALL].passes == []


def test_closing_closes_all_of_them(engines: dict[Variant, Closing]) -> None:
    ShapeDispatchEngine(WINNERS, engines).close()
    assert all(engine.closed for engine in engines.values())


def test_two_precisions_in_one_model_are_a_bug(engines: dict[Variant, Closing]) -> None:
    engines[LARGE].info = EngineInfo(compute_type="cpu-int8")
    with pytest.raises(AssertionError, match="bug: "):
        ShapeDispatchEngine(WINNERS, engines)
