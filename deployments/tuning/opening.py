"""The engine of a model on this host: what tuning chose, else the portable default."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from deployments.artifacts.manifest import Candidate
from deployments.engines import EncoderEngine, missing_requirement, open_engine
from deployments.engines.base import EngineInfo
from deployments.errors import EngineFailed, HardwareUnavailable
from deployments.messages import Batch, Outputs
from deployments.tuning.costs import CostTable, Shape, TuningTarget, Variant, read_costs
from deployments.tuning.selection import nearest_shape_variant

_REMEMBERED_SHAPES = 4_096


class ShapeDispatchEngine:
    """An Engine over the variants that win somewhere; all of them have one precision."""

    def __init__(
        self, winners: Sequence[tuple[Shape, Variant]], engines: Mapping[Variant, EncoderEngine]
    ) -> None:
        kinds = {engine.info.compute_type for engine in engines.values()}
        assert len(kinds) == 1, f"answers would depend on their company: {kinds}; this is a bug"
        self._engines = engines
        giving = [engine for engine in engines.values() if engine.info.supports_unpooled]
        self.info = EngineInfo(kinds.pop(), supports_unpooled=bool(giving))
        self._giving = giving[0] if giving else None

        @lru_cache(_REMEMBERED_SHAPES)
        def fastest(items: int, tokens: int) -> EncoderEngine:
            return engines[nearest_shape_variant(winners, items, tokens)]

        self._fastest = fastest

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        engine = self._fastest(*batch.input_ids.shape)
        if batch.unpooled and not engine.info.supports_unpooled:
            engine = self._giving or engine
        return engine.run(batch)

    def close(self) -> None:
        """Close them all."""
        for engine in self._engines.values():
            engine.close()


log = logging.getLogger("ray.serve.hundredfold")


def open_tuned_engine(target: TuningTarget) -> tuple[EncoderEngine, bool]:
    """The fastest engine known for the target, and whether it was chosen by measuring.

    Raises HardwareUnavailable when the model has no graph for the encoder's device, EngineFailed when
    none of them can be opened here.
    """
    table = read_costs(target)
    if table is None:
        return open_default_engine(target), False
    try:
        return _open_chosen(target, table), True
    except EngineFailed as exc:
        log.warning(
            "%s: what tuning chose cannot be opened, the portable default serves: %s",
            target.manifest.id,
            exc,
        )
    # Behind the block, where nothing holds what was opened half-way any more.
    return open_default_engine(target, table.rejected), False


def open_default_engine(target: TuningTarget, rejected: Collection[str] = ()) -> EncoderEngine:
    """The engine of `default_candidate`. Raises HardwareUnavailable or EngineFailed."""
    candidate = default_candidate(target, rejected)
    return open_engine(target.spec(candidate), target.settings)


def default_candidate(target: TuningTarget, rejected: Collection[str] = ()) -> Candidate:
    """The first graph that has here what it needs and is not `rejected`.

    Raises HardwareUnavailable or EngineFailed.
    """
    manifest, device = target.manifest, target.device
    if not target.candidates:
        raise HardwareUnavailable(
            f"Model {manifest.id} has no graph for the {device} encoder", field="options.use_gpu"
        )
    missing = []
    for candidate in target.candidates:
        reason = missing_requirement(target.spec(candidate), target.settings)
        if reason is None and candidate.name not in rejected:
            return candidate
        missing.append(f"{candidate.name}: {reason or 'it is not right on this host'}")
    raise EngineFailed(
        f"Model {manifest.id} cannot run on the {device} encoder: {'; '.join(missing)}"
    )


def _open_chosen(target: TuningTarget, table: CostTable) -> EncoderEngine:
    sealed = {candidate.name: candidate for candidate in target.candidates}
    engines: dict[Variant, EncoderEngine] = {}
    try:
        for variant in table.selected_variants():
            engines[variant] = _open_variant(target, sealed[variant.candidate], variant)
    except EngineFailed:
        for engine in engines.values():
            engine.close()
        raise
    if len(engines) == 1:
        return next(iter(engines.values()))
    return ShapeDispatchEngine(table.selection, engines)


def _open_variant(target: TuningTarget, candidate: Candidate, variant: Variant) -> EncoderEngine:
    spec = target.spec(candidate)
    return open_engine(replace(spec, options=variant.options(spec.options)), target.settings)
