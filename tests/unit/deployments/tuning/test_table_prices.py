from __future__ import annotations

from pathlib import Path

import pytest

from deployments.batching.prices import guess_item_s
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from deployments.tuning.costs import TuningTarget
from deployments.tuning.table_prices import TablePrices
from tests.support.cost_tables import row
from tests.support.tuning_artifacts import seal_tunable, write_table

MODEL = ModelRef("tiny/embedder", "0123456789ab")
TOKENS = 100


class PricedModel:
    """Prices of a model. Tests change its batch settings and write its cost table."""

    def __init__(self, target: TuningTarget) -> None:
        self.settings = BatchSettings(max_batch_items=1)
        self.prices = TablePrices(lambda: self.settings)
        self._target = target

    def add(self) -> None:
        self.prices.add(MODEL, self._target)

    def write(self, medians_ms: dict[str, float]) -> None:
        rows = (row("plain", medians_ms, "fp32"),)
        write_table(self._target, dict.fromkeys(medians_ms, "plain"), rows=rows)

    def price_s(self) -> float:
        return self.prices.estimate_s(MODEL, TOKENS)


@pytest.fixture
def model(tmp_path: Path) -> PricedModel:
    return PricedModel(seal_tunable(tmp_path, names=["plain"]))


def test_price_is_that_of_the_nearest_shape(model: PricedModel) -> None:
    model.write({"1x100": 7.0, "1x10": 1.0})
    model.add()
    assert model.price_s() == pytest.approx(0.007)


def test_new_table_replaces_the_guess_and_earlier_tables(model: PricedModel) -> None:
    model.add()
    assert model.price_s() == guess_item_s(MODEL, TOKENS)
    model.write({"1x100": 7.0})
    model.add()
    assert model.price_s() == pytest.approx(0.007)
    model.write({"1x100": 9.0})
    model.add()
    assert model.price_s() == pytest.approx(0.009)


def test_removed_model_is_guessed(model: PricedModel) -> None:
    model.write({"1x100": 7.0})
    model.add()
    assert model.price_s() != guess_item_s(MODEL, TOKENS)
    model.prices.remove(MODEL)
    assert model.price_s() == guess_item_s(MODEL, TOKENS)


def test_changed_batch_settings_change_the_shape(model: PricedModel) -> None:
    model.write({"1x100": 7.0, "8x100": 40.0})
    model.add()
    assert model.price_s() == pytest.approx(0.007)
    model.settings = BatchSettings(max_batch_items=8, max_batch_tokens=800)
    assert model.price_s() == pytest.approx(0.005)
