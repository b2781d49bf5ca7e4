"""What the contest of graphs found out, as values and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

from benchmarks.common.engine_timing import COMPARED_SHAPE, CoreSplit, Shape, ShapeLatency
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import format_number
from benchmarks.common.statistics import Goal, RoundSummary, summarize
from benchmarks.graphs.candidates import COMMON_RECIPE, OPENVINO_BASELINES, SEALED, TORCH
from build_artifacts.console import columns

# What is divided by what: more than 1 is good for what is sealed in the first two, bad in others.
COMPARISONS = (
    (TORCH, SEALED),
    (COMMON_RECIPE, SEALED),
    *((SEALED, rival) for rival in OPENVINO_BASELINES),
)
MIN_TORCH_SPEEDUP = 5.0
MIN_RECIPE_SPEEDUP = 1.5
MAX_OPENVINO_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class LatencyRatio:
    """Time of one contender by that of another, round by round."""

    over: str
    under: str
    shape: Shape
    times: RoundSummary

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.over} / {self.under}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One contender held against fp32 torch, each probe alone; None: no usable numbers."""

    contender: str
    probes: int
    cosine_mean: float | None
    cosine_worst: float | None
    top1_agreement: float | None  # where the model chooses
    must_pass_gate: bool
    misses: tuple[str, ...]  # where it misses the artifact's gate; empty: it is right


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResults:
    """All contenders with the cores shared out in one way."""

    placement: CoreSplit
    served: tuple[str, ...]  # variants behind SEALED, the one that serves most shapes first
    latencies: tuple[ShapeLatency, ...]
    ratios: tuple[LatencyRatio, ...]
    answer_agreements: tuple[ParityRow, ...]
    missing: Mapping[str, str]  # contender -> why


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphResults:
    """Everything the result file says beside the run's facts."""

    model_id: str
    version: str
    contenders: Mapping[str, str]  # name -> what
    heats: tuple[PlacementResults, ...]  # the first one: one pass on all threads
    metric: str | None
    scores: Mapping[str, Mapping[str, float]]  # contender -> metric -> value
    missing: Mapping[str, str]  # contender -> why
    goals: tuple[Goal, ...]


def ratios(latencies: Sequence[ShapeLatency]) -> tuple[LatencyRatio, ...]:
    """Every comparison at every shape, as far as both sides were measured."""
    found = {(one.contender, one.shape): one.ms.values for one in latencies}
    shapes = dict.fromkeys(one.shape for one in latencies)
    return tuple(
        LatencyRatio(over, under, shape, summarize(list(map(truediv, found[a], found[b]))))
        for over, under in COMPARISONS
        for shape in shapes
        if (a := (over, shape)) in found and (b := (under, shape)) in found
    )


def speed_goals(found: Sequence[LatencyRatio], max_tokens: int) -> Iterator[Goal]:
    """What is to be reached at COMPARED_SHAPE, or what it is capped to."""
    shape = Shape(COMPARED_SHAPE.batch, min(COMPARED_SHAPE.tokens, max_tokens))
    medians = {(one.over, one.under): one.times.median for one in found if one.shape == shape}
    for over, under in COMPARISONS:
        what, value = f"{over} / {under} at {shape.name}", medians.get((over, under))
        if over == SEALED:
            yield Goal.at_most(what, value, MAX_OPENVINO_RATIO)
        else:
            yield Goal.at_least(
                what, value, MIN_TORCH_SPEEDUP if over == TORCH else MIN_RECIPE_SPEEDUP
            )


def describe(figures: GraphResults) -> str:
    """The result for people."""
    lines = [f"{figures.model_id} {figures.version}", ""]
    for heat in figures.heats:
        lines += [
            f"{SEALED}: {', '.join(heat.served)}",
            _times(heat),
            "",
            _ratios(heat),
            "",
        ]
    if figures.metric is not None:
        rows = [["task metric", figures.metric]]
        rows += [[n, f"{found[figures.metric]:.4f}"] for n, found in figures.scores.items()]
        lines += [columns(rows, right=True), ""]
    missing = dict(figures.missing)
    for heat in figures.heats:
        missing |= {f"{name}, {heat.placement.name}": why for name, why in heat.missing.items()}
    lines += [f"not measured: {name}: {why}" for name, why in missing.items()]
    lines += [f"{name}: {what}" for name, what in figures.contenders.items()]
    return "\n".join([*lines, "", "targets", *(goal.sentence for goal in figures.goals)])


def _times(heat: PlacementResults) -> str:
    """A row per contender: milliseconds and spread by shape, then how near it is to torch."""
    shapes = list(dict.fromkeys(one.shape for one in heat.latencies))
    cells = {(one.contender, one.shape): one.ms for one in heat.latencies}
    timed = [f"{shape.name} ms" for shape in shapes]
    header = [heat.placement.name, *timed, "cosine", "worst", "top-1", "gate"]
    rows = [
        [
            near.contender,
            *(_spread(cells[near.contender, shape], 2) for shape in shapes),
            *("-" if v is None else f"{v:.4f}" for v in (near.cosine_mean, near.cosine_worst)),
            "-" if near.top1_agreement is None else f"{near.top1_agreement:.1%}",
            "; ".join(near.misses) or "right",
        ]
        for near in heat.answer_agreements
    ]
    return columns([header, *rows], right=True)


def _ratios(heat: PlacementResults) -> str:
    shapes = list(dict.fromkeys(one.shape for one in heat.ratios))
    cells = {(one.name, one.shape): one.times for one in heat.ratios}
    names = dict.fromkeys(one.name for one in heat.ratios)
    rows = [["times", *(shape.name for shape in shapes)]]
    rows += [[name, *(_spread(cells[name, shape], 2) for shape in shapes)] for name in names]
    return columns(rows, right=True)


def _spread(summary: RoundSummary, digits: int) -> str:
    return f"{format_number(summary.median, digits)} ({summary.spread:.0%})"


def require_accurate(figures: GraphResults) -> None:
    """Raises BenchmarkError when a graph of ours misses the gate."""
    for heat in figures.heats:
        for near in heat.answer_agreements:
            if near.must_pass_gate and near.misses:
                raise BenchmarkError(
                    f"wrong answers, so the figures mean nothing: {near.contender}, "
                    f"{heat.placement.name}: {'; '.join(near.misses)}",
                    hint="see `hundredfold models verify`, or build the model again",
                )
