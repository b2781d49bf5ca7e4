"""One tuning of one model on one kind of host: locked, measured, kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from deployments.artifacts.locks import exclusive_lock, is_locked, try_exclusive_lock
from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, missing_requirement, open_engine
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from deployments.tuning.costs import (
    CostTable,
    Shape,
    TuningTarget,
    Variant,
    VariantCosts,
    read_costs,
    write_costs,
)
from deployments.tuning.host import count_fitting, read_engine_versions, free_bytes, read_host
from deployments.tuning.measure import (
    build_batches,
    choose_clock,
    measure,
    supported_shapes,
    wait_until_idle,
)
from deployments.tuning.parity import ReferenceOutputs, check_graph
from deployments.tuning.selection import TOLERANCE, select_variants

log = logging.getLogger("ray.serve.hundredfold")

# Of the budget, what the candidates get; the rest is for the session options of their winner.
_CANDIDATES_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSpec:
    """A graph that takes part, and what it is called."""

    variant: Variant
    spec: GraphSpec

    @classmethod
    def of(cls, candidate: str, spec: GraphSpec) -> Self:
        """The candidate of that name, as it was or will be sealed."""
        return cls(variant=Variant.of(candidate, spec.options), spec=spec)

    def with_options(self, variant: Variant) -> VariantSpec:
        """The same graph with the session options of `variant`."""
        options = variant.options(self.spec.options)
        return VariantSpec(variant=variant, spec=replace(self.spec, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """How specs are to be compared.

    As many are opened at once as there is memory for, the first ones first; those that do not
    fit beside them are not measured.
    """

    settings: EncoderSettings
    shapes: Sequence[Shape]
    items: Sequence[TokenizedItem]  # their tokens fill the batches
    seconds: float
    available_bytes: int | None = None  # None: what is free on the device of the specs

    def fit_in_memory(self, specs: Sequence[VariantSpec]) -> Sequence[VariantSpec]:
        """Those that may be open at once. Raises EngineFailed when it is none."""
        if not specs:
            return specs
        available_bytes = self.available_bytes
        if available_bytes is None:
            available_bytes = free_bytes(specs[0].spec.device)
        fitting = count_fitting((c.spec.path for c in specs), available_bytes)
        if not fitting:
            free_mb = available_bytes // 1_000_000
            raise EngineFailed(f"not enough memory to measure in: {free_mb} MB are free")
        for contender in specs[fitting:]:
            log.warning("%s is not measured: not enough memory", contender.variant.name)
        return specs[:fitting]


def tune(target: TuningTarget, reference: ReferenceOutputs, plan: MeasurementPlan) -> CostTable:
    """The table of this host for the target's sealed candidates.

    Candidates that cannot run here are left out, and so are those that miss the artifact's gate
    here: kernels round differently from one CPU to another. Raises EngineFailed when none is
    left.
    """
    entered = [VariantSpec.of(c.name, target.spec(c)) for c in target.candidates]
    plan.fit_in_memory(entered[:1])  # before any is opened
    rejected: dict[str, str] = {}
    for contender in entered:
        if reason := _unfit(contender.spec, target, reference):
            rejected[contender.variant.candidate] = reason
    fit = [c for c in entered if c.variant.candidate not in rejected]
    if not fit:
        raise EngineFailed(f"no graph is right on this host: {_told(rejected)}")
    rows = measure_variants(fit, plan)
    measured = {row.variant.candidate for row in rows}
    for contender in fit:
        if contender.variant.candidate not in measured:
            rejected[contender.variant.candidate] = "it could not be measured beside the others"
    return build_cost_table(target.manifest.version, entered, rows, plan, rejected)


def _unfit(spec: GraphSpec, target: TuningTarget, reference: ReferenceOutputs) -> str | None:
    """Why the graph may not be used on this host."""
    if reason := missing_requirement(spec, target.settings):
        return reason
    verdict = check_graph(spec, target.settings, reference, target.manifest.gate)
    return None if verdict.passed else "; ".join(verdict.reasons)


def _told(rejected: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in rejected.items()) or "there is none"


def build_cost_table(
    version: str,
    entered: Sequence[VariantSpec],
    rows: Sequence[VariantCosts],
    plan: MeasurementPlan,
    rejected: Mapping[str, str],
) -> CostTable:
    """What was measured of the graphs that were `entered`, with the winners chosen."""
    return CostTable(
        version=version,
        host=read_host(entered[0].spec.device),
        threads=plan.settings.intra_op_threads,
        providers=plan.settings.providers,
        engines=read_engine_versions(contender.spec.engine for contender in entered),
        rows=tuple(rows),
        selection=select_variants(drop_marginal_variants(rows)),
        rejected=dict(rejected),
    )


def measure_variants(specs: Sequence[VariantSpec], plan: MeasurementPlan) -> list[VariantCosts]:
    """The costs of the specs, and of other session options of the one that wins most.

    Raises EngineFailed when none of them could be measured.
    """
    rows = measure_fitting(specs, plan, _CANDIDATES_SHARE)
    if not rows:
        raise EngineFailed("every graph failed while it was measured")
    winner = _winner(specs, rows)
    variants = [winner, *map(winner.with_options, _other_options(winner, plan.settings))]
    again = measure_fitting(variants, plan, 1 - _CANDIDATES_SHARE)
    return merge_costs(rows, again)


def drop_marginal_variants(rows: Sequence[VariantCosts]) -> list[VariantCosts]:
    """`rows` without session options that gain no more than the tolerance on the whole.

    The first row of a candidate is what its others have to beat, at all of its shapes together. At
    a few of them noise gains as much, and an arena costs memory, a spinning thread its core.
    """
    plain: dict[str, VariantCosts] = {}
    for row in rows:
        plain.setdefault(row.variant.candidate, row)
    return [
        row
        for row in rows
        if (base := plain[row.variant.candidate]) is row or _gain(base, row) > TOLERANCE
    ]


def _gain(base: VariantCosts, row: VariantCosts) -> float:
    """How much faster than `base` on the whole, as a share; 0 where a shape was not measured."""
    times = row.by_shape()
    if not base.by_shape().keys() <= times.keys():
        return 0.0
    ratios = [math.log(times[shape] / ms) for shape, ms in base.by_shape().items()]
    return 1 - math.exp(sum(ratios) / len(ratios))


def merge_costs(rows: Sequence[VariantCosts], again: Sequence[VariantCosts]) -> list[VariantCosts]:
    """`again`, and what only `rows` have.

    A variant's new figures replace the old, so that it is compared with its other options in one
    plan; at shapes that the second one had no time for, the old ones stay.
    """
    before = {row.variant: row for row in rows}
    return [*(_completed(row, before.pop(row.variant, row)) for row in again), *before.values()]


def _completed(row: VariantCosts, before: VariantCosts) -> VariantCosts:
    shapes = row.by_shape()
    kept = (cost for cost in before.costs if cost.shape not in shapes)
    return row.model_copy(update={"costs": (*row.costs, *kept)})


def _other_options(winner: VariantSpec, settings: EncoderSettings) -> Iterator[Variant]:
    if winner.spec.engine != "onnxruntime" or winner.spec.device is not Device.CPU:
        return
    variant = winner.variant
    yield variant.model_copy(update={"arena": not variant.arena})
    if settings.intra_op_threads > 1:
        yield variant.model_copy(update={"spinning": not variant.spinning})


def _winner(specs: Sequence[VariantSpec], rows: Sequence[VariantCosts]) -> VariantSpec:
    named = [variant for _, variant in select_variants(rows)]
    return max(specs, key=lambda contender: named.count(contender.variant))


def measure_fitting(
    specs: Sequence[VariantSpec], plan: MeasurementPlan, share: float = 1.0
) -> list[VariantCosts]:
    """The costs of those specs that there is memory for and that do not fail.

    All of them are for one device, and get `share` of the plan's time. Raises EngineFailed when
    there is no memory for any.
    """
    with open_engines(plan.fit_in_memory(specs), plan.settings) as engines:
        costs = measure(
            engines,
            plan.shapes,
            partial(build_batches, plan.items),
            plan.seconds * share,
            choose_clock(specs[0].spec.device, plan.settings.intra_op_threads),
            wait_until_idle,
        )
    return [
        VariantCosts(
            variant=contender.variant,
            precision=contender.spec.precision,
            costs=costs[contender.variant.name],
        )
        for contender in specs
        if contender.variant.name in costs
    ]


@contextmanager
def open_engines(
    specs: Sequence[VariantSpec], settings: EncoderSettings
) -> Iterator[dict[str, EncoderEngine]]:
    """An engine by name of every contender that can be opened, closed on the way out."""
    engines: dict[str, EncoderEngine] = {}
    try:
        for contender in specs:
            try:
                engines[contender.variant.name] = open_engine(contender.spec, settings)
            except EngineFailed as exc:
                log.warning("%s is not measured: %s", contender.variant.name, exc)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def tune_exclusively(
    target: TuningTarget,
    seconds: float,
    *,
    force: bool = False,
    wait: bool = False,
    shapes: Sequence[Shape] | None = None,
) -> CostTable | None:
    """The table of this host, measured now unless a valid one is there and `force` is not set.

    One at a time per kind of host, wherever the store is shared: while somebody else measures,
    `wait` decides between waiting and None. `shapes` None: all that the model reads of the usual
    ones. Raises ArtifactError, EngineFailed, and OSError where the store cannot be written.
    """
    with _locked(_lock_path(target), wait=wait) as is_ours:
        if not is_ours:
            return None
        if not force and (found := read_costs(target)) is not None:
            return found
        reference = ReferenceOutputs.read(target.artifact / REFERENCE_NAME)
        plan = MeasurementPlan(
            settings=target.settings,
            shapes=shapes or supported_shapes(target.manifest.max_tokens),
            items=reference.items,
            seconds=seconds,
        )
        table = tune(target, reference, plan)
        write_costs(target.artifact, table)
        return table


def is_tuning(target: TuningTarget) -> bool:
    """Whether somebody measures for this kind of host right now."""
    try:
        return is_locked(_lock_path(target))
    except OSError:  # nothing to be read there, or no such locks in this file system
        return False


def _lock_path(target: TuningTarget) -> Path:
    return target.costs_path.with_suffix(".lock")


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Whether the lock is ours, which it always is after a wait."""

    def tell(holder: str) -> None:
        log.info("waiting for the tuning by %s", holder or "another process")

    path.parent.mkdir(parents=True, exist_ok=True)
    if not wait:
        with try_exclusive_lock(path) as is_ours:
            yield is_ours
        return
    with exclusive_lock(path, tell):
        yield True
