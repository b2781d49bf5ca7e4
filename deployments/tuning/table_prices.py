"""Price of an item in seconds of one engine thread, from cost tables.

The price is the number of the item's tokens, times the time per token at one measured shape. That
shape is the nearest to a full pass with items of this length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from deployments.batching.prices import guess_item_s
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from deployments.tuning.costs import Shape, TuningTarget, selected_times
from deployments.tuning.selection import nearest_shape
from deployments.tuning.similar_costs import find_nearest_costs

_CACHED_LENGTHS = 8_192


class TablePrices:
    """Prices of items from the cost tables of their models; a guess for a model without a table."""

    def __init__(self, settings: Callable[[], BatchSettings]) -> None:
        self._tables: dict[ModelRef, _TableTimes] = {}
        self._settings = settings

    def add(self, model: ModelRef, target: TuningTarget) -> None:
        """Read the cost table to use for a model. Thread-safe.

        The table replaces an earlier one, which stays if no table is found.
        """
        table = find_nearest_costs(target)
        if table is not None and (times := selected_times(table)):
            self._tables[model] = _TableTimes(times)

    def remove(self, model: ModelRef) -> None:
        self._tables.pop(model, None)

    def estimate_s(self, model: ModelRef, tokens: int) -> float:
        table = self._tables.get(model)
        if table is None:
            return guess_item_s(model, tokens)
        settings = self._settings()
        return _estimate_s(table, tokens, settings.max_batch_items, settings.max_batch_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _TableTimes:
    """Milliseconds of one table by shape. Compared by identity, so it can be a cache key."""

    by_shape: Mapping[Shape, float]


@lru_cache(_CACHED_LENGTHS)
def _estimate_s(table: _TableTimes, tokens: int, max_items: int, max_tokens: int) -> float:
    items = max(min(max_items, max_tokens // tokens), 1)
    shape = nearest_shape(table.by_shape, items, tokens)
    return table.by_shape[shape] / 1e3 / shape.area * tokens
