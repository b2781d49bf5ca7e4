"""The engine of a model on this host: what tuning chose, else the portable default."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from deployments.engines import Engine, lacking, open_engine
from deployments.errors import EngineFailed, HardwareUnavailable
from deployments.manifest import Candidate
from deployments.tuning.costs import CostTable, Variant, read_costs
from deployments.tuning.placement import Placement
from deployments.tuning.regimes import RegimeEngine

log = logging.getLogger("ray.serve.hundredfold")


def open_best(placement: Placement) -> tuple[Engine, bool]:
    """The fastest engine known for the placement, and whether it was chosen by measuring.

    Raises HardwareUnavailable when the model has no graph for the lane's device, EngineFailed when
    none of them can be opened here.
    """
    table = read_costs(placement)
    if table is None:
        return open_default(placement), False
    try:
        return _open_chosen(placement, table), True
    except EngineFailed as exc:
        log.warning(
            "%s: what tuning chose cannot be opened, the portable default serves: %s",
            placement.manifest.id,
            exc,
        )
    # Behind the block, where nothing holds what was opened half-way any more.
    return open_default(placement, table.refused), False


def open_default(placement: Placement, refused: Collection[str] = ()) -> Engine:
    """The engine of `default_candidate`. Raises HardwareUnavailable or EngineFailed."""
    candidate = default_candidate(placement, refused)
    return open_engine(placement.spec(candidate), placement.lane)


def default_candidate(placement: Placement, refused: Collection[str] = ()) -> Candidate:
    """The first graph that has here what it needs and is not `refused`.

    Raises HardwareUnavailable or EngineFailed.
    """
    manifest, device = placement.manifest, placement.device
    if not placement.candidates:
        raise HardwareUnavailable(
            f"Model {manifest.id} has no graph for the {device} lane", field="options.use_gpu"
        )
    missing = []
    for candidate in placement.candidates:
        reason = lacking(placement.spec(candidate), placement.lane)
        if reason is None and candidate.name not in refused:
            return candidate
        missing.append(f"{candidate.name}: {reason or 'it is not right on this host'}")
    raise EngineFailed(f"Model {manifest.id} cannot run on the {device} lane: {'; '.join(missing)}")


def _open_chosen(placement: Placement, table: CostTable) -> Engine:
    sealed = {candidate.name: candidate for candidate in placement.candidates}
    engines: dict[Variant, Engine] = {}
    try:
        for variant in table.chosen():
            engines[variant] = _open_variant(placement, sealed[variant.candidate], variant)
    except EngineFailed:
        for engine in engines.values():
            engine.close()
        raise
    if len(engines) == 1:
        return next(iter(engines.values()))
    return RegimeEngine(table.winners, engines)


def _open_variant(placement: Placement, candidate: Candidate, variant: Variant) -> Engine:
    spec = placement.spec(candidate)
    return open_engine(replace(spec, options=variant.options(spec.options)), placement.lane)
