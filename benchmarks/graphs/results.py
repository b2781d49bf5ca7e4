"""Results of the graph benchmark as values and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.engine_timing import COMPARED_SHAPE, CoreSplit, ShapeLatency, cap_shapes
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import Table, format_number
from benchmarks.common.statistics import Goal, RoundSummary, summarize_ratios
from benchmarks.graphs.candidates import COMMON_RECIPE, DYNAMIC, OPENVINO_BASELINES, SEALED, TORCH
from deployments.tuning.costs import Shape

# (numerator, denominator) of latency ratios. The artifact (SEALED) is the denominator of the first
# two ratios, which should exceed 1. It is the numerator of the remaining ratios, which should not
# exceed 1 by much.
COMPARISONS = (
    (TORCH, SEALED),
    (COMMON_RECIPE, SEALED),
    *((SEALED, baseline) for baseline in (DYNAMIC, *OPENVINO_BASELINES)),
)
MIN_TORCH_SPEEDUP = 5.0
MIN_RECIPE_SPEEDUP = 1.5
MAX_OPENVINO_RATIO = 1.1
MAX_DYNAMIC_RATIO = 1.03


@dataclass(frozen=True, slots=True)
class LatencyRatio:
    """Latency of system `over` divided by the latency of system `under`, one ratio per round."""

    over: str
    under: str
    shape: Shape
    ratio: RoundSummary

    @property
    def name(self) -> str:
        return f"{self.over} / {self.under}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """Similarity of one system's outputs to fp32 torch on unbatched probe texts.

    Values are None if the outputs are unusable.
    """

    system: str
    probes: int
    cosine_mean: float | None
    cosine_worst: float | None
    top1_agreement: float | None  # None also if the task chooses no label or token
    must_pass_gate: bool
    violations: tuple[str, ...]  # violated limits of the artifact's accuracy gate


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplitResults:
    """Results of all systems with one core split."""

    split: CoreSplit
    served: tuple[str, ...]  # variants of SEALED; the most frequently selected one first
    latencies: tuple[ShapeLatency, ...]
    ratios: tuple[LatencyRatio, ...]
    parity: tuple[ParityRow, ...]
    missing: Mapping[str, str]  # system -> reason


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphResults:
    """Results of the graph benchmark, as written to the result file."""

    model_id: str
    version: str
    systems: Mapping[str, str]  # name -> description
    runs: tuple[CoreSplitResults, ...]  # one per core split
    metric: str | None
    scores: Mapping[str, Mapping[str, float]]  # system -> metric -> value
    missing: Mapping[str, str]  # system -> reason
    goals: tuple[Goal, ...]


def compute_ratios(latencies: Sequence[ShapeLatency]) -> tuple[LatencyRatio, ...]:
    """Compute each ratio of COMPARISONS at each shape where both systems were measured."""
    values = {(timing.system, timing.shape): timing.ms for timing in latencies}
    shapes = dict.fromkeys(timing.shape for timing in latencies)
    return tuple(
        LatencyRatio(over, under, shape, summarize_ratios(values[a], values[b]))
        for over, under in COMPARISONS
        for shape in shapes
        if (a := (over, shape)) in values and (b := (under, shape)) in values
    )


def speed_goals(ratios: Sequence[LatencyRatio], max_tokens: int) -> Iterator[Goal]:
    """Yield the goals at COMPARED_SHAPE. The tokens of the shape are limited to `max_tokens`."""
    (shape,) = cap_shapes(max_tokens, [COMPARED_SHAPE])
    medians = {(r.over, r.under): r.ratio.median for r in ratios if r.shape == shape}
    for over, under in COMPARISONS:
        what, value = f"{over} / {under} at {shape}", medians.get((over, under))
        if over == SEALED:
            limit = MAX_DYNAMIC_RATIO if under == DYNAMIC else MAX_OPENVINO_RATIO
            yield Goal.at_most(what, value, limit)
        else:
            minimum = MIN_TORCH_SPEEDUP if over == TORCH else MIN_RECIPE_SPEEDUP
            yield Goal.at_least(what, value, minimum)


def build_tables(results: GraphResults) -> list[Table]:
    """Build two tables per run: latencies with parity, and ratios. Then add the task metrics."""
    tables = []
    for run in results.runs:
        tables += [_latency_table(run), _ratio_table(run)]
    if results.metric is not None:
        rows = [[name, f"{s[results.metric]:.4f}"] for name, s in results.scores.items()]
        tables.append(Table("metric", ("task metric", results.metric), rows))
    return tables


def _latency_table(run: CoreSplitResults) -> Table:
    shapes = list(dict.fromkeys(timing.shape for timing in run.latencies))
    summaries = {(timing.system, timing.shape): timing.ms for timing in run.latencies}
    timed = [f"{shape} ms" for shape in shapes]
    header = [run.split.name, *timed, "cosine", "worst", "top-1", "gate"]
    rows = [
        [
            row.system,
            *(_format_summary(summaries[row.system, shape]) for shape in shapes),
            *("-" if v is None else f"{v:.4f}" for v in (row.cosine_mean, row.cosine_worst)),
            "-" if row.top1_agreement is None else f"{row.top1_agreement:.1%}",
            "; ".join(row.violations) or "passed",
        ]
        for row in run.parity
    ]
    return Table(f"latency, {run.split.name}", header, rows)


def _ratio_table(run: CoreSplitResults) -> Table:
    shapes = list(dict.fromkeys(r.shape for r in run.ratios))
    summaries = {(r.name, r.shape): r.ratio for r in run.ratios}
    names = dict.fromkeys(r.name for r in run.ratios)
    rows = [
        [name, *(_format_summary(summaries[name, shape]) for shape in shapes)] for name in names
    ]
    return Table(f"ratios, {run.split.name}", ["ratio", *map(str, shapes)], rows)


def _format_summary(summary: RoundSummary) -> str:
    return f"{format_number(summary.median, 2)} ({summary.spread:.0%})"


def describe(results: GraphResults) -> str:
    """Return the console text: tables, systems that were not measured, and goals."""
    lines = [f"{results.model_id} {results.version}", ""]
    lines += [f"{SEALED}, {run.split.name}: {', '.join(run.served)}" for run in results.runs]
    for table in build_tables(results):
        lines += ["", table.text]
    missing = dict(results.missing)
    for run in results.runs:
        missing |= {f"{name}, {run.split.name}": why for name, why in run.missing.items()}
    lines += ["", *(f"not measured: {name}: {reason}" for name, reason in missing.items())]
    lines += [f"{name}: {what}" for name, what in results.systems.items()]
    return "\n".join([*lines, "", "goals", *(goal.sentence for goal in results.goals)])


def require_accurate(results: GraphResults) -> None:
    """Raise BenchmarkError if a graph that must pass the accuracy gate violates it."""
    for run in results.runs:
        for row in run.parity:
            if row.must_pass_gate and row.violations:
                raise BenchmarkError(
                    f"the answers are wrong, so the timings are invalid: {row.system}, "
                    f"{run.split.name}: {'; '.join(row.violations)}",
                    hint="check it with `hundredfold models verify`, or build it again",
                )
