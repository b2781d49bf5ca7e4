"""What the serving benchmark found out, as values and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.agreement import CosineCheck, require_agreement
from benchmarks.common.engine_timing import CoreSplit
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import number
from benchmarks.common.statistics import PERCENTILES, RoundSummary, percentiles_ms, summarize
from benchmarks.serving.load import LoadResult
from build_artifacts.console import columns


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """What one number of connections gave. Summaries are over the rounds."""

    connections: int
    requests: int  # good answers in all windows
    requests_per_s: RoundSummary
    latency_ms: Mapping[
        str, RoundSummary
    ]  # p50, p90, p95, p99; empty when a round had no good answer
    failures: Mapping[str, int]  # by status or reason, warm-up included
    client_cpu_s_per_request: float | None  # what the load generator itself cost

    @classmethod
    def of(cls, results: Sequence[LoadResult]) -> LoadLevel:
        """The summary of all rounds of one level."""
        rounds = [percentiles_ms(result.latencies_s) for result in results]
        requests = sum(len(result.latencies_s) for result in results)
        cpu_s = sum(result.cpu_s for result in results)
        failures: Counter[str] = Counter()
        for result in results:
            failures.update(result.failures)
        return cls(
            connections=results[0].connections,
            requests=requests,
            requests_per_s=summarize([result.requests_per_s for result in results]),
            latency_ms={k: summarize([r[k] for r in rounds]) for k in rounds[0] if all(rounds)},
            failures=failures,
            client_cpu_s_per_request=cpu_s / requests if requests else None,
        )


@dataclass(frozen=True, slots=True)
class EngineThroughput:
    """The raw engine in the same run."""

    placement: CoreSplit
    sentences_per_s: RoundSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResults:
    """Everything the result file says beside the run's facts."""

    url: str
    model: Mapping[str, Any]  # as the server describes it
    compute_type: str | None
    sentences: str
    sentence_count: int
    window_s: float
    levels: tuple[LoadLevel, ...]
    engine: tuple[EngineThroughput, ...]
    served_over_engine: float | None  # the most connections over the best placement
    agreements: tuple[CosineCheck, ...]


def served_over_engine(
    levels: Sequence[LoadLevel], engine: Sequence[EngineThroughput]
) -> float | None:
    """Requests per second at the most connections over the best raw sentences per second."""
    if not engine:
        return None
    served = max(levels, key=lambda level: level.connections).requests_per_s.median
    return served / max(level.sentences_per_s.median for level in engine)


def describe(figures: ServingResults) -> str:
    """The result for people."""
    header = ["connections", "requests/s", "spread", *(f"p{p} ms" for p in PERCENTILES), "failures",
              "client CPU us"]  # fmt: skip
    lines = [columns([header, *map(_row, figures.levels)], right=True)]
    for level in figures.engine:
        speed = level.sentences_per_s
        lines.append(
            f"raw engine, {level.placement.name}: {number(speed.median)} sentences/s "
            f"(spread {speed.spread:.0%})"
        )
    if figures.served_over_engine is not None:
        most = max(level.connections for level in figures.levels)
        ratio = figures.served_over_engine
        lines.append(f"served / raw engine at {most} connections: {ratio:.3f}")
    lines += [agreement.sentence for agreement in figures.agreements]
    return "\n".join(lines)


def _row(level: LoadLevel) -> list[str]:
    latencies = [level.latency_ms.get(f"p{p}") for p in PERCENTILES]
    cpu_s = level.client_cpu_s_per_request
    return [
        str(level.connections),
        number(level.requests_per_s.median),
        f"{level.requests_per_s.spread:.0%}",
        *("-" if latency is None else number(latency.median, 2) for latency in latencies),
        ", ".join(f"{n} x {why}" for why, n in level.failures.items()) or "0",
        "-" if cpu_s is None else number(cpu_s * 1e6, 1),
    ]


def require_correct(figures: ServingResults) -> None:
    """Raises BenchmarkError when a request failed or an answer was wrong."""
    failed = [level for level in figures.levels if level.failures]
    if failed:
        raise BenchmarkError(
            f"requests failed at {', '.join(str(level.connections) for level in failed)} "
            "connections, so the figures mean nothing",
            hint="the table says how; look into the server's log",
        )
    require_agreement(figures.agreements)
