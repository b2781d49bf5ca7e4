"""Does what tuning chose still win? Every candidate measured again, shape by shape.

The same batches, clock and plan as tuning; the winners of the stored table against the fastest
of now.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    add_run_options,
    add_store_option,
    positive_count,
    positive_seconds,
)
from benchmarks.common.report import format_number, log_progress, start_run, write_result
from benchmarks.common.statistics import Goal
from build_artifacts.console import columns
from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import missing_requirement
from deployments.tuning.costs import Cost, CostTable, Shape, TuningTarget, Variant, read_costs
from deployments.tuning.measure import build_batches, choose_clock, measure, wait_until_idle
from deployments.tuning.parity import ReferenceOutputs, check_graph
from deployments.tuning.tuner import VariantSpec, open_engines

WITHIN = 1.05


@dataclass(frozen=True, slots=True)
class SelectionCheck:
    """The table's winner at one shape, and who is fastest now."""

    shape: str
    winner: str
    winner_ms: float
    fastest: str
    fastest_ms: float
    ratio: float  # winner_ms by fastest_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResults:
    """Everything the result file says beside the run's facts."""

    model_id: str
    version: str
    table: str  # the path of the cost table
    threads: int
    seconds: float
    measured: tuple[str, ...]  # variants
    left_out: Mapping[str, str]  # candidate -> why
    check_selection: tuple[SelectionCheck, ...]
    unmeasured: tuple[str, ...]  # shapes that there was no time for
    goal: Goal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks tuning`."""
    parser.add_argument("model", metavar="MODEL", help="ID or ID:VERSION")
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
        help="for all timed passes (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print, write; 0 also where a winner does not win any more."""
    command: str = arguments.command_line
    facts = start_run("tuning", command, arguments.seed)
    figures = remeasure(arguments)
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    return 0


def remeasure(arguments: argparse.Namespace) -> TuningResults:
    """All right candidates again. Raises BenchmarkError for a host that was not tuned for."""
    model = LocalModel.named(arguments.store, arguments.model)
    settings = EncoderSettings(intra_op_threads=arguments.threads)
    placement = TuningTarget(model.directory, model.manifest, Device.CPU, settings)
    kept = read_costs(placement)
    if kept is None:
        raise BenchmarkError(
            f"`{arguments.model}` has no cost table for {arguments.threads} threads on this host",
            hint=f"run `hundredfold models tune {arguments.model} --threads {arguments.threads}`",
        )
    reference = ReferenceOutputs.read(model.directory / REFERENCE_NAME)
    specs, left_out = select_variants(placement, kept, reference)
    log_progress(f"measuring {', '.join(one.variant.name for one in specs)}")
    with open_engines(specs, settings) as engines:
        costs = measure(
            engines,
            [shape for shape, _ in kept.selection],
            partial(build_batches, reference.items, seed=arguments.seed),
            arguments.seconds,
            choose_clock(Device.CPU, arguments.threads),
            wait_until_idle,
        )
    found = check_selection(kept.selection, costs)
    done = {one.shape for one in found}
    return TuningResults(
        model_id=model.manifest.id,
        version=model.manifest.version,
        table=str(placement.costs_path),
        threads=arguments.threads,
        seconds=arguments.seconds,
        measured=tuple(costs),
        left_out=left_out,
        check_selection=found,
        unmeasured=tuple(str(shape) for shape, _ in kept.selection if str(shape) not in done),
        goal=evaluate_goal(found),
    )


def select_variants(
    placement: TuningTarget, kept: CostTable, reference: ReferenceOutputs
) -> tuple[list[VariantSpec], dict[str, str]]:
    """What tuning chose and every sealed candidate, as far as they are right here; why others not.

    Whatever is measured is held against the sealed reference first.
    """
    found: dict[Variant, VariantSpec] = {}
    left_out: dict[str, str] = {}
    for candidate in placement.candidates:
        contender = VariantSpec.of(candidate.name, placement.spec(candidate))
        if reason := _unfit(contender, placement, reference):
            left_out[candidate.name] = reason
            continue
        chosen = [v for v in kept.selected_variants() if v.candidate == candidate.name]
        for variant in dict.fromkeys((contender.variant, *chosen)):
            found[variant] = contender.with_options(variant)
    return list(found.values()), left_out


def _unfit(
    contender: VariantSpec, placement: TuningTarget, reference: ReferenceOutputs
) -> str | None:
    if reason := missing_requirement(contender.spec, placement.settings):
        return reason
    verdict = check_graph(contender.spec, placement.settings, reference, placement.manifest.gate)
    return "; ".join(verdict.reasons) or None


def check_selection(
    winners: Sequence[tuple[Shape, Variant]], costs: Mapping[str, Sequence[Cost]]
) -> tuple[SelectionCheck, ...]:
    """The winner of every shape that was measured. Raises BenchmarkError when one was not."""
    now = {name: {cost.shape: cost.median_ms for cost in found} for name, found in costs.items()}
    measured = {shape for times in now.values() for shape in times}
    found = []
    for shape, variant in winners:
        if shape not in measured:
            continue
        if variant.name not in now:
            raise BenchmarkError(
                f"`{variant.name}` wins at {shape} and cannot be measured here",
                hint="see `hundredfold models verify`",
            )
        winner_ms = now[variant.name][shape]
        fastest_ms, fastest = min((times[shape], name) for name, times in now.items())
        ratio = winner_ms / fastest_ms
        found.append(
            SelectionCheck(str(shape), variant.name, winner_ms, fastest, fastest_ms, ratio)
        )
    return tuple(found)


def evaluate_goal(found: Sequence[SelectionCheck]) -> Goal:
    """At every shape the winner is within 5 % of the fastest."""
    worst = max((one.ratio for one in found), default=None)
    return Goal.at_most("winner / fastest at the worst shape", worst, WITHIN)


def describe(figures: TuningResults) -> str:
    """The result for people."""
    header = ["items x tokens", "winner", "ms", "fastest now", "ms", "ratio"]
    rows = [
        [one.shape, one.winner, format_number(one.winner_ms, 2), one.fastest, format_number(one.fastest_ms, 2),
         f"{one.ratio:.3f}"]
        for one in figures.check_selection
    ]  # fmt: skip
    near = sum(one.ratio <= WITHIN for one in figures.check_selection)
    lines = [
        f"{figures.model_id} {figures.version}, {figures.threads} threads a pass",
        "",
        columns([header, *rows], right=True),
        "",
        f"{near} of {len(rows)} shapes within {WITHIN - 1:.0%}",
        *(f"left out: {name}: {why}" for name, why in figures.left_out.items()),
    ]
    if figures.unmeasured:
        lines.append(f"no time for {', '.join(figures.unmeasured)}")
    return "\n".join([*lines, figures.goal.sentence])
