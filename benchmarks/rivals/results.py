"""Results of the rivals as values, tables and a plot. Ratios above 1 favor Hundredfold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.plots import create_figure, draw_bars, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number
from benchmarks.common.statistics import RoundSummary, percentiles_ms, summarize
from benchmarks.rivals.workloads import GENERATION
from benchmarks.serving.load import LoadResult
from benchmarks.serving.results import LoadLevel

OURS = "hundredfold"
_NOTHING = "-"

Ratio = RoundSummary | None


@dataclass(frozen=True, slots=True)
class LevelName:
    """Key of a measurement: a workload at a number of connections."""

    workload: str
    connections: int


@dataclass(frozen=True, slots=True)
class PairedLevel:
    """A rival and Hundredfold at one level. Each round measures one directly after the other."""

    level: LevelName
    rival: LoadLevel
    ours: LoadLevel
    rate_ratio: Ratio  # requests/s ours / rival, times `work_ratio`; None: no responses
    p50_ratio: Ratio  # median latency rival / ours

    @classmethod
    def summarize(
        cls,
        level: LevelName,
        rival: Sequence[LoadResult],
        ours: Sequence[LoadResult],
        work_ratio: float = 1.0,
    ) -> PairedLevel:
        """Summarize all rounds.

        `work_ratio` is the ratio ours / rival of the tokens per response to the same prompts; 1
        for embeddings.
        """
        pairs = list(zip(ours, rival, strict=True))
        rates = [_divide(a.requests_per_s * work_ratio, b.requests_per_s) for a, b in pairs]
        p50s = [_divide(_p50_ms(b), _p50_ms(a)) for a, b in pairs]
        return cls(
            level,
            LoadLevel.summarize(rival),
            LoadLevel.summarize(ours),
            _summarize_all(rates),
            _summarize_all(p50s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCheck:
    """Comparison of generated texts with the greedy answers of the artifact in this process."""

    empty: int  # answers without text where the artifact has one
    same: int  # equal texts
    equal_leading_share: float  # mean share of the tokens before the first difference
    must_be_equal: bool

    @property
    def phrase(self) -> str:
        return f"{self.empty} without text, {self.same} equal to the artifact's"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """Result of the comparison of a server's answers with the expected answers."""

    compared: int
    worst_cosine: float | None  # lowest cosine to the fp32 reference; None for generated text
    required_cosine: float | None
    tokens_per_response: float | None  # None for embeddings
    completions: CompletionCheck | None = None  # None for embeddings

    @property
    def is_met(self) -> bool:
        """Whether all compared answers are right; False if no answer was compared."""
        if not self.compared:
            return False
        if (texts := self.completions) is not None:
            is_equal = not texts.must_be_equal or texts.same == self.compared
            return not texts.empty and bool(self.tokens_per_response) and is_equal
        if self.worst_cosine is None or self.required_cosine is None:
            return False
        return self.worst_cosine >= self.required_cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class OurModel:
    """A model that Hundredfold served, and the check of its answers."""

    id: str
    version: str
    compute_type: str
    is_generative: bool
    check: AnswerCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalResult:
    """Results of a rival. `skipped` lists the levels whose requests would take too long."""

    name: str
    title: str
    package: str
    version: str
    computes_with: str
    packages: Mapping[str, str]
    check: AnswerCheck
    levels: tuple[PairedLevel, ...]
    skipped: tuple[LevelName, ...]
    idle_cores: RoundSummary | None  # CPU cores that the rival uses while Hundredfold is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalResults:
    """Results of the benchmark, as written to the result file."""

    models: tuple[OurModel, ...]
    rounds: int
    window_s: float
    workloads: Mapping[str, float]  # name -> tokens per text
    engine: Mapping[str, RoundSummary]  # workload -> requests/s of the engine alone
    idle_cores: RoundSummary | None  # CPU cores that Hundredfold uses while a rival is measured
    rivals: tuple[RivalResult, ...]
    missing: Mapping[str, str]  # server without results -> reason

    @property
    def our_levels(self) -> dict[LevelName, list[LoadLevel]]:
        """Results of Hundredfold by level, one entry per rival."""
        levels: dict[LevelName, list[LoadLevel]] = {}
        for rival in self.rivals:
            for paired in rival.levels:
                levels.setdefault(paired.level, []).append(paired.ours)
        return levels


def build_tables(results: RivalResults) -> tuple[Table, ...]:
    """Build a table per workload, then the tables of lengths, systems and missing servers."""
    levels = results.our_levels
    workloads = [name for name in results.workloads if any(k.workload == name for k in levels)]
    tables = [_workload_table(results, levels, name) for name in workloads]
    return (*tables, _lengths_table(results), _systems_table(results), _missing_table(results))


def _workload_table(
    results: RivalResults, ours: Mapping[LevelName, list[LoadLevel]], workload: str
) -> Table:
    names = sorted((n for n in ours if n.workload == workload), key=lambda n: n.connections)
    header = ["system", "computes with"]
    for name in names:
        at = f"at {name.connections}"
        header += [f"requests/s {at}", f"p50 ms {at}", f"{OURS} / it {at}"]
    is_generative = workload == GENERATION
    types = [m.compute_type for m in results.models if m.is_generative == is_generative]
    first = [OURS, *types]
    our_rates = [
        float(np.median([v for level in ours[name] for v in level.requests_per_s.values]))
        for name in names
    ]
    for name, rate in zip(names, our_rates, strict=True):
        p50s = [p50 for level in ours[name] if (p50 := _median_p50(level)) is not None]
        first += [_format_rate(rate, ours[name]), _format(_median(p50s)), _NOTHING]
    rows = [first]
    if workload in results.engine:
        engine = results.engine[workload].median
        shares = ((format_number(engine, 1), _NOTHING, _format(r / engine, 2)) for r in our_rates)
        rows.append(["the engine alone", *types, *chain.from_iterable(shares)])
    for rival in results.rivals:
        by_name = {paired.level: paired for paired in rival.levels}
        if any(name in by_name for name in names):
            cells = (cell for name in names for cell in _level_cells(by_name.get(name)))
            rows.append([rival.title, rival.computes_with, *cells])
    return Table(workload, header, rows)


def _level_cells(paired: PairedLevel | None) -> list[str]:
    if paired is None:
        return [_NOTHING] * 3
    return [
        _format_rate(paired.rival.requests_per_s.median, [paired.rival]),
        _format(_median_p50(paired.rival)),
        _format(paired.rate_ratio.median if paired.rate_ratio else None, 2),
    ]


def _format_rate(rate: float, levels: Sequence[LoadLevel]) -> str:
    failed = sum(sum(level.failures.values()) for level in levels)
    shown = format_number(rate, 1)
    return f"{shown} ({failed} failed)" if failed else shown


def _lengths_table(results: RivalResults) -> Table:
    rows = [[name, format_number(tokens, 1)] for name, tokens in results.workloads.items()]
    return Table("workloads", ("workload", "mean tokens per text"), rows)


def _systems_table(results: RivalResults) -> Table:
    header = ("system", "version", "computes with", "answers compared", "worst cosine to fp32",
              "equal leading tokens", "idle CPU cores")  # fmt: skip
    idle = _format_idle(results.idle_cores)
    rows = [
        [f"{OURS}, {m.id}", m.version, m.compute_type, *_check_cells(m.check), idle]
        for m in results.models
    ]
    for rival in results.rivals:
        cells = _check_cells(rival.check)
        version = f"{rival.package} {rival.version}"
        idle = _format_idle(rival.idle_cores)
        rows.append([rival.title, version, rival.computes_with, *cells, idle])
    return Table("systems", header, rows)


def _check_cells(check: AnswerCheck) -> list[str]:
    texts = check.completions
    equal_leading_share = _NOTHING if texts is None else f"{texts.equal_leading_share:.0%}"
    return [str(check.compared), _format(check.worst_cosine, 4), equal_leading_share]


def _missing_table(results: RivalResults) -> Table:
    return Table("missing", ("not measured", "reason"), list(map(list, results.missing.items())))


def describe(results: RivalResults) -> str:
    """Return the console text: all tables that have rows."""
    tables = build_tables(results)
    return "\n\n".join(f"{table.name}\n{table.text}" for table in tables if table.rows)


def require_answered(results: RivalResults) -> None:
    """Raise BenchmarkError if a request to Hundredfold failed."""
    failures: Counter[str] = Counter()
    for levels in results.our_levels.values():
        for level in levels:
            failures.update(level.failures)
    if failures:
        raise BenchmarkError(
            f"requests to {OURS} failed, so its rates and ratios are invalid: {dict(failures)}",
            hint="see the tables above and the server's log",
        )


def plot_rivals(out: Path, run: RunMetadata, results: RivalResults) -> list[Path]:
    """Plot ratios: rates at the highest, latencies at the lowest number of connections."""
    if not results.rivals:
        return []
    figure, (rates, latencies) = create_figure(
        run, ", ".join(model.id for model in results.models), size=(16.0, 7.0)
    )
    connections = [level.connections for level in results.our_levels]
    most, fewest = max(connections), min(connections)
    _draw(rates, results, most, lambda paired: paired.rate_ratio)
    _draw(latencies, results, fewest, lambda paired: paired.p50_ratio)
    label_axes(rates, "", f"requests/s of {OURS} / its, {most} connections", logarithmic=True)
    label_axes(latencies, "", f"its p50 / p50 of {OURS}, {fewest} connections", logarithmic=True)
    return save_figure(figure, out, run)


def _draw(
    axes: Any, results: RivalResults, connections: int, ratio: Callable[[PairedLevel], Ratio]
) -> None:
    """Draw the ratios of all rivals and workloads at one number of connections."""
    missing = RoundSummary(float("nan"), float("nan"), float("nan"), ())
    names = [rival.title for rival in results.rivals]
    series = []
    for workload in results.workloads:
        name = LevelName(workload, connections)
        found = [
            next((ratio(paired) for paired in rival.levels if paired.level == name), None)
            for rival in results.rivals
        ]
        if any(found):
            series.append((workload, [summary or missing for summary in found]))
    if series:
        draw_bars(axes, names, series)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.tick_params("x", rotation=60)


def _p50_ms(result: LoadResult) -> float:
    return percentiles_ms(result.latencies_s).get("p50", 0.0)


def _median_p50(level: LoadLevel) -> float | None:
    summary = level.latency_ms.get("p50")
    return summary.median if summary else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _divide(left: float, right: float) -> float | None:
    return left / right if left and right else None


def _summarize_all(ratios: Sequence[float | None]) -> RoundSummary | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return summarize(known) if known and len(known) == len(ratios) else None


def _format_idle(cores: RoundSummary | None) -> str:
    return _NOTHING if cores is None else format_number(cores.median, 2)


def _format(value: float | None, digits: int = 1) -> str:
    return _NOTHING if value is None else format_number(value, digits)
