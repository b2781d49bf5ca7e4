"""Check of the tuning result by a new measurement of every candidate at every shape.

The check measures with the batches, the clock and the schedule of tuning. It compares the variant
that the stored cost table selects with the fastest variant of this run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import add_run_options
from benchmarks.common.report import Table, format_number, log_progress, publish, start_run
from benchmarks.common.statistics import Goal
from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import missing_requirement
from deployments.terminal.command_line import positive_count, positive_seconds
from deployments.terminal.console import add_store_option
from deployments.tuning.costs import Cost, CostTable, Shape, TuningTarget, Variant, read_costs
from deployments.tuning.measure import build_batches, choose_clock, measure, wait_until_idle
from deployments.tuning.parity import ReferenceOutputs, check_graph
from deployments.tuning.tuner import VariantSpec, open_engines

MAX_RATIO = 1.05


@dataclass(frozen=True, slots=True)
class SelectionCheck:
    """The selected variant at one shape, and the fastest variant of this run."""

    shape: str
    selected: str
    selected_ms: float
    fastest: str
    fastest_ms: float
    ratio: float  # selected_ms / fastest_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResults:
    """Results of the tuning check, as written to the result file."""

    model_id: str
    version: str
    cost_table: str  # path of the cost table
    threads: int
    seconds: float
    measured: tuple[str, ...]  # names of the measured variants
    skipped: Mapping[str, str]  # candidate -> reason
    checks: tuple[SelectionCheck, ...]
    unmeasured: tuple[str, ...]  # shapes that `seconds` left no time for
    goal: Goal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="ID or ID@VERSION")
    add_store_option(parser)
    add_run_options(parser)
    parser.add_argument(
        "--threads", type=positive_count, default=1, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=120.0,
        metavar="S",
        help="total time of the timed passes (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Return 0 even if a selected variant is no longer fastest."""
    metadata = start_run("tuning", arguments.command_line, arguments.seed)
    results = remeasure(arguments)
    publish(arguments, metadata, results, [build_table(results)], text=describe(results))
    return 0


def remeasure(arguments: argparse.Namespace) -> TuningResults:
    """Measure all accurate candidates. Raise BenchmarkError if this host has no cost table."""
    model = LocalModel.open(arguments.store, arguments.model)
    settings = EncoderSettings(intra_op_threads=arguments.threads)
    target = TuningTarget(model.directory, model.manifest, Device.CPU, settings)
    table = read_costs(target)
    if table is None:
        raise BenchmarkError(
            f"`{arguments.model}` has no cost table for {arguments.threads} threads on this host",
            hint=f"run `hundredfold models tune {arguments.model} --threads {arguments.threads}`",
        )
    reference = ReferenceOutputs.read(model.directory / REFERENCE_NAME)
    specs, skipped = select_variants(target, table, reference)
    log_progress(f"measuring {', '.join(spec.variant.name for spec in specs)}")
    with open_engines(specs, settings) as engines:
        costs = measure(
            engines,
            [shape for shape, _ in table.selection],
            partial(build_batches, reference.items, seed=arguments.seed),
            arguments.seconds,
            choose_clock(Device.CPU, arguments.threads),
            wait_until_idle,
        )
    checks = check_selection(table.selection, costs)
    measured = {check.shape for check in checks}
    return TuningResults(
        model_id=model.manifest.id,
        version=model.manifest.version,
        cost_table=str(target.costs_path),
        threads=arguments.threads,
        seconds=arguments.seconds,
        measured=tuple(costs),
        skipped=skipped,
        checks=checks,
        unmeasured=tuple(str(shape) for shape, _ in table.selection if str(shape) not in measured),
        goal=evaluate_goal(checks),
    )


def select_variants(
    target: TuningTarget, table: CostTable, reference: ReferenceOutputs
) -> tuple[list[VariantSpec], dict[str, str]]:
    """Return the variants to measure, and the reasons of skipped candidates.

    Every candidate contributes the variant of the artifact and the variants that `table` selects.
    Candidates that this host cannot run are skipped. So are candidates whose outputs differ too
    much from the reference outputs in the artifact.
    """
    specs: dict[Variant, VariantSpec] = {}
    skipped: dict[str, str] = {}
    for candidate in target.candidates:
        spec = VariantSpec.of(candidate.name, target.spec(candidate))
        if reason := _skip_reason(spec, target, reference):
            skipped[candidate.name] = reason
            continue
        selected = [v for v in table.selected_variants() if v.candidate == candidate.name]
        for variant in dict.fromkeys((spec.variant, *selected)):
            specs[variant] = spec.with_options(variant)
    return list(specs.values()), skipped


def _skip_reason(
    spec: VariantSpec, target: TuningTarget, reference: ReferenceOutputs
) -> str | None:
    if reason := missing_requirement(spec.spec, target.settings):
        return reason
    result = check_graph(spec.spec, target.settings, reference, target.manifest.gate)
    return "; ".join(result.reasons) or None


def check_selection(
    selection: Sequence[tuple[Shape, Variant]], costs: Mapping[str, Sequence[Cost]]
) -> tuple[SelectionCheck, ...]:
    """Check every measured shape. Raise BenchmarkError if a selected variant was not measured."""
    now = {name: {c.shape: c.median_ms for c in entries} for name, entries in costs.items()}
    measured = {shape for times in now.values() for shape in times}
    checks = []
    for shape, variant in selection:
        if shape not in measured:
            continue
        if variant.name not in now:
            raise BenchmarkError(
                f"`{variant.name}` is selected at {shape} but cannot be measured on this host",
                hint="see `hundredfold models verify`",
            )
        selected_ms = now[variant.name][shape]
        fastest_ms, fastest = min((times[shape], name) for name, times in now.items())
        ratio = selected_ms / fastest_ms
        checks.append(
            SelectionCheck(str(shape), variant.name, selected_ms, fastest, fastest_ms, ratio)
        )
    return tuple(checks)


def evaluate_goal(checks: Sequence[SelectionCheck]) -> Goal:
    """Return the goal that each selected variant takes at most MAX_RATIO times the fastest time."""
    worst = max((check.ratio for check in checks), default=None)
    return Goal.at_most("selected / fastest at the worst shape", worst, MAX_RATIO)


def build_table(results: TuningResults) -> Table:
    header = ("items x tokens", "selected", "ms", "fastest now", "ms", "ratio")
    rows = [
        (
            check.shape,
            check.selected,
            format_number(check.selected_ms, 2),
            check.fastest,
            format_number(check.fastest_ms, 2),
            f"{check.ratio:.3f}",
        )
        for check in results.checks
    ]
    return Table("selection", header, rows)


def describe(results: TuningResults) -> str:
    """Return the console text: the table, skipped candidates and the goal."""
    within = sum(check.ratio <= MAX_RATIO for check in results.checks)
    lines = [
        f"{results.model_id} {results.version}, {results.threads} threads per pass",
        "",
        build_table(results).text,
        "",
        f"{within} of {len(results.checks)} shapes within {MAX_RATIO - 1:.0%}",
        *(f"skipped: {name}: {reason}" for name, reason in results.skipped.items()),
    ]
    if results.unmeasured:
        lines.append(f"not measured for lack of time: {', '.join(results.unmeasured)}")
    return "\n".join([*lines, results.goal.sentence])
