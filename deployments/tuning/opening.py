"""Opening of a model's engine on this host: the tuned variants, else the default candidate."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from deployments.artifacts.manifest import Candidate
from deployments.engines import EncoderEngine, missing_requirement, open_engine
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed, HardwareUnavailable, RequirementMissing
from deployments.tuning.costs import CostTable, Shape, TuningTarget, Variant
from deployments.tuning.selection import nearest_shape_variant
from deployments.tuning.similar_costs import find_selecting_costs

log = logging.getLogger("ray.serve.hundredfold")

_CACHED_SHAPES = 4_096


class ShapeDispatchEngine:
    """An EncoderEngine that runs each batch on the variant selected for the nearest measured shape.

    All variants round alike, so that the output does not depend on the batch.
    """

    def __init__(
        self, selection: Sequence[tuple[Shape, Variant]], engines: Mapping[Variant, EncoderEngine]
    ) -> None:
        compute_types = {engine.info.compute_type for engine in engines.values()}
        if len(compute_types) != 1:
            raise AssertionError(f"bug: variants of different compute types: {compute_types}")
        self._engines = engines
        self._unpooled = next((e for e in engines.values() if e.info.supports_unpooled), None)
        self.info = EngineInfo(compute_types.pop(), supports_unpooled=self._unpooled is not None)

        @lru_cache(_CACHED_SHAPES)
        def select_engine(items: int, tokens: int) -> EncoderEngine:
            return engines[nearest_shape_variant(selection, items, tokens)]

        self._select_engine = select_engine

    def run(self, batch: Batch) -> Outputs:
        """Run `batch` on the variant that is selected for its shape.

        If this variant does not support an unpooled batch, run it on one that does. Raises
        EngineFailed, also if no variant supports an unpooled batch.
        """
        engine = self._select_engine(*batch.input_ids.shape)
        if batch.unpooled and not engine.info.supports_unpooled:
            engine = self._unpooled or engine
        return engine.run(batch)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


class OpenedEngine(NamedTuple):
    """Engine of a model, and how it was selected."""

    engine: EncoderEngine
    is_tuned: bool  # whether a cost table of this host and number of threads selected the engine
    variant: Variant | None  # the engine's only variant; None: the engine runs several variants


def open_tuned_engine(target: TuningTarget) -> OpenedEngine:
    """Open the fastest engine according to the cost tables.

    Without a table of this host, use the table of the most similar host whose variants compute the
    same outputs here. Without such a table, or if its variants cannot be opened, open the default
    candidate. Raises HardwareUnavailable if the model has no graph for the encoder's device. Raises
    EngineFailed if there is no default candidate or it cannot be opened; no other graph is tried.
    """
    table = find_selecting_costs(target)
    if table is None:
        return _open_default(target)
    try:
        engine = open_selected(target, table)
    except EngineFailed as exc:
        log.warning(
            "%s: the tuned variants cannot be opened, the default candidate is used: %s",
            target.manifest.id,
            exc,
        )
    else:
        here = (target.host, target.settings.intra_op_threads)
        first, *others = table.selected_variants()
        return OpenedEngine(
            engine, (table.host, table.threads) == here, variant=None if others else first
        )
    # Not in the except block, where the exception would keep the partly opened engines in memory.
    return _open_default(target, table.rejected)


def default_candidate(target: TuningTarget, rejected: Collection[str] = ()) -> Candidate:
    """Return the first candidate that can run on this host and is not in `rejected`.

    Raises HardwareUnavailable if the model has no graph for the encoder's device,
    RequirementMissing if this process can run none of its graphs.
    """
    manifest, device = target.manifest, target.device
    if not target.candidates:
        raise HardwareUnavailable(
            f"Model {manifest.id} has no graph for the {device} encoder. Omit `options.use_gpu`",
            field="options.use_gpu",
        )
    reasons = []
    for candidate in target.candidates:
        missing = missing_requirement(target.spec(candidate), target.settings)
        if missing is None and candidate.name not in rejected:
            return candidate
        reasons.append(f"{candidate.name}: {missing or 'the cost table rejects it'}")
    raise RequirementMissing(
        f"Model {manifest.id} cannot run on the {device} encoder: {'; '.join(reasons)}"
    )


def _open_default(target: TuningTarget, rejected: Collection[str] = ()) -> OpenedEngine:
    candidate = default_candidate(target, rejected)
    engine = open_engine(target.spec(candidate), target.settings)
    variant = Variant.of(candidate.name, candidate.options)
    return OpenedEngine(engine, is_tuned=False, variant=variant)


def open_selected(target: TuningTarget, table: CostTable) -> EncoderEngine:
    """Open the variants that `table` selects. Raises EngineFailed if one cannot be opened."""
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
