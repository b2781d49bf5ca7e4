"""Tuning of one model on one kind of host: lock, check accuracy, measure, select, store."""

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
from deployments.artifacts.store import make_host_directory
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, missing_requirement, open_engine
from deployments.engines.cuda_errors import check_context
from deployments.errors import EngineFailed
from deployments.host.idle_cores import keep_cores_awake
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
from deployments.tuning.host import count_fitting, free_bytes, read_engine_versions, read_host
from deployments.tuning.measure import (
    build_batches,
    choose_clock,
    measure,
    supported_shapes,
    wait_until_idle,
)
from deployments.tuning.parity import ReferenceOutputs, check_graph
from deployments.tuning.selection import select_variants

log = logging.getLogger("ray.serve.hundredfold")

# Share of the time budget for measuring the candidates. The remainder is for other session options
# of the fastest candidate.
_CANDIDATES_SHARE = 0.7
_NO_MEMORY = "not enough memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSpec:
    """A graph to measure, and the variant under which its costs are stored."""

    variant: Variant
    spec: GraphSpec

    @classmethod
    def of(cls, candidate: str, spec: GraphSpec) -> Self:
        """Create the VariantSpec of a candidate's graph `spec`, without changes to its options."""
        return cls(variant=Variant.of(candidate, spec.options), spec=spec)

    def with_options(self, variant: Variant) -> VariantSpec:
        """Return the same graph with the session options of `variant`."""
        options = variant.options(self.spec.options)
        return VariantSpec(variant=variant, spec=replace(self.spec, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Conditions of a measurement.

    All measured graphs are open at once, so only the first graphs that fit in memory together are
    measured.
    """

    settings: EncoderSettings
    shapes: Sequence[Shape]
    items: Sequence[TokenizedItem]  # their tokens fill the batches
    seconds: float  # time budget
    available_bytes: int | None = None  # None: the free memory of the device

    def fit_in_memory(self, specs: Sequence[VariantSpec]) -> Sequence[VariantSpec]:
        """Return the leading specs that may be open at once. Raises EngineFailed if none fits."""
        if not specs:
            return specs
        available_bytes = self._count_available(specs[0].spec.device)
        fitting = count_fitting((spec.spec.path for spec in specs), available_bytes)
        if not fitting:
            free_mb = available_bytes // 1_000_000
            raise EngineFailed(f"{_NO_MEMORY} to measure the first graph: {free_mb} MB are free")
        for spec in specs[fitting:]:
            log.warning("%s is not measured: %s", spec.variant.name, _NO_MEMORY)
        return specs[:fitting]

    def explain_unmeasurable(self, spec: VariantSpec) -> str | None:
        """Return why this process cannot open the graph, even alone; None if it can."""
        if missing := missing_requirement(spec.spec, self.settings):
            return missing
        available_bytes = self._count_available(spec.spec.device)
        return None if count_fitting([spec.spec.path], available_bytes) else _NO_MEMORY

    def _count_available(self, device: Device) -> int:
        return free_bytes(device) if self.available_bytes is None else self.available_bytes


def tune(target: TuningTarget, reference: ReferenceOutputs, plan: MeasurementPlan) -> CostTable:
    """Build the cost table of the target's sealed candidates on this host.

    Leaves out candidates that cannot run, fail the accuracy gate or cannot be measured here. A
    candidate that passed the gate at the build may fail, because kernels round differently on each
    CPU. Raises EngineFailed if no candidate is left, if the first one does not fit in memory, or if
    CUDA was lost meanwhile.
    """
    specs = [VariantSpec.of(c.name, target.spec(c)) for c in target.candidates]
    plan.fit_in_memory(specs[:1])  # raises before any graph is opened
    rejected: dict[str, str] = {}
    unmeasured: dict[str, str] = {}
    accepted: list[VariantSpec] = []
    for spec in specs:
        if reason := plan.explain_unmeasurable(spec):
            unmeasured[spec.variant.candidate] = reason
            continue
        result = check_graph(spec.spec, target.settings, reference, target.manifest.gate)
        if result.passed:
            accepted.append(spec)
        else:
            rejected[spec.variant.candidate] = "; ".join(result.reasons)
    if not accepted:
        reasons = _format(unmeasured | rejected)
        raise EngineFailed(f"no graph passes the accuracy gate on this host: {reasons}")
    rows = measure_variants(accepted, plan)
    check_context()  # without CUDA, graphs failed that work
    measured = {row.variant.candidate for row in rows}
    for spec in accepted:
        if spec.variant.candidate not in measured:
            unmeasured[spec.variant.candidate] = "it could not be measured together with the others"
    table = build_cost_table(target.manifest.version, specs, rows, plan)
    return table.model_copy(update={"rejected": rejected, "unmeasured": unmeasured})


def _format(reasons: Mapping[str, str]) -> str:
    text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return text or "the artifact has no graph for this device"


def build_cost_table(
    version: str,
    specs: Sequence[VariantSpec],
    rows: Sequence[VariantCosts],
    plan: MeasurementPlan,
) -> CostTable:
    """Build the cost table of measured `specs` and select its variants."""
    return CostTable(
        version=version,
        host=read_host(specs[0].spec.device),
        threads=plan.settings.intra_op_threads,
        providers=plan.settings.providers,
        engines=read_engine_versions(spec.spec.engine for spec in specs),
        rows=tuple(rows),
        selection=select_variants(keep_fastest_options(rows)),
    )


def measure_variants(specs: Sequence[VariantSpec], plan: MeasurementPlan) -> list[VariantCosts]:
    """Measure the graphs, then other session options of the graph that is selected most often.

    A single graph is measured together with its other options. Raises EngineFailed if no graph
    could be measured, or if the first graph does not fit in memory.
    """
    varied = {spec.variant: _vary_options(spec, plan.settings) for spec in specs}
    if len(specs) == 1:
        specs = [*specs, *varied[specs[0].variant]]
        varied = {}
    rows = measure_fitting(specs, plan, _CANDIDATES_SHARE if any(varied.values()) else 1.0)
    if not rows:
        raise EngineFailed("every graph failed while it was measured")
    best = _most_selected(specs, rows)
    if not varied.get(best.variant):
        return rows
    repeated = measure_fitting([best, *varied[best.variant]], plan, 1 - _CANDIDATES_SHARE)
    return merge_costs(rows, repeated)


def keep_fastest_options(rows: Sequence[VariantCosts]) -> list[VariantCosts]:
    """Keep one row per candidate: the row of the session options with the lowest mean time.

    Two sessions of one graph would need the graph's memory twice. The mean over the shapes counts,
    because differences at single shapes are noise. If the kept row lacks a shape, copy the time
    from the candidate's first row.
    """
    by_candidate: dict[str, list[VariantCosts]] = {}
    for row in rows:
        by_candidate.setdefault(row.variant.candidate, []).append(row)
    return [
        _add_missing_shapes(max(variants, key=partial(_gain, variants[0])), variants[0])
        for variants in by_candidate.values()
    ]


def _gain(base: VariantCosts, row: VariantCosts) -> float:
    """Return the mean share of the time of `base` that `row` saves.

    Return 0 if `row` lacks at least half of the shapes of `base`.
    """
    times, base_times = row.by_shape(), base.by_shape()
    ratios = [math.log(times[shape] / ms) for shape, ms in base_times.items() if shape in times]
    if len(ratios) * 2 <= len(base_times):
        return 0.0
    return 1 - math.exp(sum(ratios) / len(ratios))


def merge_costs(
    rows: Sequence[VariantCosts], repeated: Sequence[VariantCosts]
) -> list[VariantCosts]:
    """Return the costs in `repeated`, and those in `rows` that were not measured again.

    `repeated` replaces earlier costs, because only costs of one measurement are comparable.
    """
    earlier = {row.variant: row for row in rows}
    merged = [_add_missing_shapes(row, earlier.pop(row.variant, row)) for row in repeated]
    return [*merged, *earlier.values()]


def _add_missing_shapes(row: VariantCosts, earlier: VariantCosts) -> VariantCosts:
    shapes = row.by_shape()
    missing = (cost for cost in earlier.costs if cost.shape not in shapes)
    return row.model_copy(update={"costs": (*row.costs, *missing)})


def _vary_options(spec: VariantSpec, settings: EncoderSettings) -> list[VariantSpec]:
    """Return the same graph with the other session options to measure; empty if there are none."""
    is_cpu_session = spec.spec.engine == "onnxruntime" and spec.spec.device is Device.CPU
    if not is_cpu_session or settings.intra_op_threads == 1:
        return []
    variant = spec.variant
    return [spec.with_options(variant.model_copy(update={"spinning": not variant.spinning}))]


def _most_selected(specs: Sequence[VariantSpec], rows: Sequence[VariantCosts]) -> VariantSpec:
    variants = [variant for _, variant in select_variants(rows)]
    return max(specs, key=lambda spec: variants.count(spec.variant))


def measure_fitting(
    specs: Sequence[VariantSpec], plan: MeasurementPlan, share: float = 1.0
) -> list[VariantCosts]:
    """Measure the specs that fit in memory and do not fail, in `share` of the time budget.

    All specs must be for one device. Raises EngineFailed if not even the first fits in memory.
    """
    # Keep the cores awake, as the server does during requests. Otherwise passes of several threads
    # would wait for cores to wake, but passes of one thread would not. The planner of lone passes
    # compares both times.
    with open_engines(plan.fit_in_memory(specs), plan.settings) as engines, keep_cores_awake():
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
            variant=spec.variant,
            precision=spec.spec.precision,
            costs=costs[spec.variant.name],
        )
        for spec in specs
        if spec.variant.name in costs
    ]


@contextmanager
def open_engines(
    specs: Sequence[VariantSpec], settings: EncoderSettings
) -> Iterator[dict[str, EncoderEngine]]:
    """Open an engine for each spec, by variant name. Skip specs that fail. Close all on exit."""
    engines: dict[str, EncoderEngine] = {}
    try:
        for spec in specs:
            try:
                engines[spec.variant.name] = open_engine(spec.spec, settings)
            except EngineFailed as exc:
                log.warning("%s is not measured: %s", spec.variant.name, exc)
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
    """Return the cost table of this host. Measure it if `read_costs` finds none or `force` is set.

    A lock in the store lets only one process at a time tune a model for one kind of host and one
    number of threads. While another process has the lock, wait if `wait` is set, else return None.
    `shapes` defaults to the default shapes within the model's `max_tokens`. Raises ArtifactError
    for missing or damaged reference outputs, EngineFailed as `tune` does, and OSError if the store
    cannot be written.
    """
    with _locked(_lock_path(target), wait=wait) as is_acquired:
        if not is_acquired:
            return None
        if not force and (stored := read_costs(target)) is not None:
            return stored
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
    """Return whether a process is tuning the target now; False if that cannot be determined."""
    try:
        return is_locked(_lock_path(target))
    except OSError:  # no permission, or a file system without locks
        return False


def _lock_path(target: TuningTarget) -> Path:
    return target.costs_path.with_suffix(".lock")


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock, and yield whether it was acquired: always True with `wait`."""

    def report(holder: str) -> None:
        log.info("waiting for the tuning by %s", holder or "another process")

    make_host_directory(path.parent)
    if not wait:
        with try_exclusive_lock(path) as is_acquired:
            yield is_acquired
        return
    with exclusive_lock(path, report):
        yield True
