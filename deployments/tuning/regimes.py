"""Several engines of one model as one: each batch goes to the one that was fastest at its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from deployments.engines.base import Engine, EngineInfo
from deployments.messages import Batch, Outputs
from deployments.tuning.choose import nearest
from deployments.tuning.costs import Shape, Variant

_REMEMBERED_SHAPES = 4_096


class RegimeEngine:
    """An Engine over the variants that win somewhere; all of them have one precision."""

    def __init__(
        self, winners: Sequence[tuple[Shape, Variant]], engines: Mapping[Variant, Engine]
    ) -> None:
        kinds = {engine.info.compute_type for engine in engines.values()}
        assert len(kinds) == 1, f"answers would depend on their company: {kinds}; this is a bug"
        self._engines = engines
        giving = [engine for engine in engines.values() if engine.info.gives_every_token]
        self.info = EngineInfo(kinds.pop(), gives_every_token=bool(giving))
        self._giving = giving[0] if giving else None

        @lru_cache(_REMEMBERED_SHAPES)
        def fastest(items: int, tokens: int) -> Engine:
            return engines[nearest(winners, items, tokens)]

        self._fastest = fastest

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        engine = self._fastest(*batch.input_ids.shape)
        if batch.every_token and not engine.info.gives_every_token:
            engine = self._giving or engine
        return engine.run(batch)

    def close(self) -> None:
        """Close them all."""
        for engine in self._engines.values():
            engine.close()
