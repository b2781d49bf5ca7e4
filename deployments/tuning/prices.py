"""Estimated time of an item in a full pass, from cost tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from deployments.batching.prices import guess_item_s
from deployments.config import BatchSettings
from deployments.messages import ModelRef
from deployments.tuning.costs import Shape, TuningTarget, selected_times
from deployments.tuning.selection import nearest_shape
from deployments.tuning.similar_costs import find_nearest_costs

_CACHED_LENGTHS = 8_192


class TablePrices:
    """Implements `EstimateItem`; a model without a table is guessed."""

    def __init__(self, settings: Callable[[], BatchSettings]) -> None:
        self._tables: dict[ModelRef, Mapping[Shape, float]] = {}
        self._settings = settings
        self.estimate_s = lru_cache(_CACHED_LENGTHS)(self._estimate_s)

    def add(self, model: ModelRef, target: TuningTarget) -> None:
        """Read the nearest table of a model before its first estimate. Thread-safe."""
        if (table := find_nearest_costs(target)) is not None:
            self._tables[model] = selected_times(table)

    def remove(self, model: ModelRef) -> None:
        self._tables.pop(model, None)

    def _estimate_s(self, model: ModelRef, tokens: int) -> float:
        times: Mapping[Shape, float] = self._tables.get(model, {})
        if not times:
            return guess_item_s(model, tokens)
        settings = self._settings()
        items = max(min(settings.max_batch_items, settings.max_batch_tokens // tokens), 1)
        shape = nearest_shape(times, items, tokens)
        return times[shape] / 1e3 / shape.area * tokens
