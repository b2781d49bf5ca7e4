"""Results of the serving benchmark as values, tables and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.agreement import CosineCheck, require_agreement
from benchmarks.common.engine_timing import CoreSplit
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.plots import COLORS, create_figure, draw_bars, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_counts, format_number
from benchmarks.common.statistics import (
    PERCENTILES,
    RoundSummary,
    percentiles_ms,
    summarize,
    summarize_ratios,
)
from benchmarks.serving.load import LoadResult


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """Results at one number of connections, summarized over the rounds."""

    connections: int
    requests: int  # number of responses with status 200 in all windows
    requests_per_s: RoundSummary
    latency_ms: Mapping[str, RoundSummary]  # p50 to p99; empty if a round had no response
    failures: Mapping[str, int]  # number by status or reason, including warm-ups
    client_cpu_s_per_request: float | None  # CPU time of the load generator; None: no response

    @classmethod
    def summarize(cls, rounds: Sequence[LoadResult]) -> LoadLevel:
        latencies = [percentiles_ms(result.latencies_s) for result in rounds]
        requests = sum(len(result.latencies_s) for result in rounds)
        cpu_s = sum(result.cpu_s for result in rounds)
        failures: Counter[str] = Counter()
        for result in rounds:
            failures.update(result.failures)
        ranks = latencies[0] if all(latencies) else {}
        return cls(
            connections=rounds[0].connections,
            requests=requests,
            requests_per_s=summarize([result.requests_per_s for result in rounds]),
            latency_ms={rank: summarize([ms[rank] for ms in latencies]) for rank in ranks},
            failures=failures,
            client_cpu_s_per_request=cpu_s / requests if requests else None,
        )


@dataclass(frozen=True, slots=True)
class EngineThroughput:
    """Throughput of the raw engine in the same run."""

    split: CoreSplit
    sentences_per_s: RoundSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResults:
    """Results of the serving benchmark, as written to the result file."""

    url: str
    model: Mapping[str, Any]  # body of GET /models/{id}
    compute_type: str | None
    sentences: str
    sentence_count: int
    window_s: float
    levels: tuple[LoadLevel, ...]
    engine: tuple[EngineThroughput, ...]
    served_over_engine: float | None  # see the function `served_over_engine`
    checks: tuple[CosineCheck, ...]


def served_over_engine(
    levels: Sequence[LoadLevel], engine: Sequence[EngineThroughput]
) -> float | None:
    """Divide requests/s at the most connections by the sentences/s of the fastest core split.

    Return the median of the ratios within rounds, or None if the engine was not measured.
    """
    if not engine:
        return None
    served = max(levels, key=lambda level: level.connections).requests_per_s
    fastest = max((entry.sentences_per_s for entry in engine), key=lambda rate: rate.median)
    return summarize_ratios(served, fastest).median


def build_tables(results: ServingResults) -> tuple[Table]:
    header = ("connections", "requests/s", "spread", *(f"p{p} ms" for p in PERCENTILES),
              "failures", "client CPU us")  # fmt: skip
    return (Table("levels", header, [_level_row(level) for level in results.levels]),)


def _level_row(level: LoadLevel) -> list[str]:
    latencies = [level.latency_ms.get(f"p{p}") for p in PERCENTILES]
    cpu_s = level.client_cpu_s_per_request
    return [
        str(level.connections),
        format_number(level.requests_per_s.median),
        f"{level.requests_per_s.spread:.0%}",
        *("-" if latency is None else format_number(latency.median, 2) for latency in latencies),
        format_counts(level.failures),
        "-" if cpu_s is None else format_number(cpu_s * 1e6, 1),
    ]


def describe(results: ServingResults) -> str:
    """Return the console text: the table, rates of the raw engine, and checks of the answers."""
    lines = [table.text for table in build_tables(results)]
    for entry in results.engine:
        rate = entry.sentences_per_s
        lines.append(
            f"raw engine, {entry.split.name}: {format_number(rate.median)} sentences/s "
            f"(spread {rate.spread:.0%})"
        )
    if results.served_over_engine is not None:
        connections = max(level.connections for level in results.levels)
        ratio = results.served_over_engine
        lines.append(f"served / raw engine at {connections} connections: {ratio:.3f}")
    lines += [check.sentence for check in results.checks]
    return "\n".join(lines)


def require_correct(results: ServingResults) -> None:
    """Raise BenchmarkError if a request failed or an answer was wrong."""
    failed = [str(level.connections) for level in results.levels if level.failures]
    if failed:
        raise BenchmarkError(
            f"requests failed at {', '.join(failed)} connections, so the timings are invalid",
            hint="see the column `failures` above and the server's log",
        )
    require_agreement(results.checks)


def plot_serving(out: Path, run: RunMetadata, results: ServingResults) -> list[Path]:
    """Plot requests per second and latency by connections. Return the paths."""
    title = f"{results.model['id']}, one sentence per request"
    figure, (rates, latencies) = create_figure(run, title)
    names = [str(level.connections) for level in results.levels]
    draw_bars(rates, names, [("served", [level.requests_per_s for level in results.levels])])
    if results.engine:
        best = max(entry.sentences_per_s.median for entry in results.engine)
        rates.axhline(best, color=COLORS[1], linestyle="--", label="raw engine, batches of 32")
    label_axes(rates, "connections", "requests per second")
    for color, rank in zip(COLORS, PERCENTILES, strict=False):
        summaries = [level.latency_ms.get(f"p{rank}") for level in results.levels]
        medians = [float("nan") if s is None else s.median for s in summaries]
        latencies.plot(names, medians, marker="o", color=color, label=f"p{rank}")
    label_axes(latencies, "connections", "latency, ms", logarithmic=True)
    return save_figure(figure, out, run)
