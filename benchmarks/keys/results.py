"""Results of the benchmark of API keys: goals and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.report import Table
from benchmarks.common.statistics import Goal

# Goals. MAX_COST is a share of the throughput. MAX_SHARE_ERROR is relative to the rate limit.
MAX_REFUSAL_MS, MAX_COST, MAX_SHARE_ERROR = 5.0, 0.03, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysResults:
    """Results of the benchmark, as written to the result file."""

    refusal_ms: Mapping[str, Mapping[str, float]]  # percentiles by kind of refusal
    connections: int
    without_keys: Sequence[float]  # requests/s by round
    with_keys: Sequence[float]
    noisy_allowed_per_s: float
    noisy_answered_per_s: float
    noisy_refused_per_s: float  # responses 429, including those of the warm-up
    noisy_failures: Mapping[str, int]  # failures other than 429
    quiet_alone_ms: Mapping[str, float]
    quiet_beside_ms: Mapping[str, float]
    quiet_failures: Mapping[str, int]  # alone and beside the noisy client

    @property
    def cost(self) -> float:
        """Share of the throughput that is lost with keys: the median over the rounds."""
        pairs = zip(self.with_keys, self.without_keys, strict=True)
        return 1 - statistics.median(keyed / free for keyed, free in pairs)

    @property
    def noisy_share(self) -> float:
        return self.noisy_answered_per_s / self.noisy_allowed_per_s


def evaluate_goals(results: KeysResults) -> list[Goal]:
    slowest = max(times["p99"] for times in results.refusal_ms.values())
    failed = sum(results.quiet_failures.values()) + sum(results.noisy_failures.values())
    return [
        Goal.at_most("p99 of a refused key, ms", slowest, MAX_REFUSAL_MS),
        Goal.at_most("share of the throughput that keys cost", results.cost, MAX_COST),
        Goal.at_most(
            "error of the share of a noisy key", abs(results.noisy_share - 1), MAX_SHARE_ERROR
        ),
        Goal.at_most("failed requests beside the refusals of the noisy key", failed, 0),
    ]


def build_tables(results: KeysResults) -> list[Table]:
    refusals = [
        (name, f"{times['p50']:.2f}", f"{times['p99']:.2f}")
        for name, times in results.refusal_ms.items()
    ]
    cost = (
        str(results.connections),
        f"{statistics.median(results.without_keys):.0f}",
        f"{statistics.median(results.with_keys):.0f}",
        f"{results.cost:.1%}",
    )
    noisy = (
        f"{results.noisy_allowed_per_s:.1f}",
        f"{results.noisy_answered_per_s:.1f}",
        f"{results.noisy_refused_per_s:.0f}",
        f"{results.quiet_alone_ms['p50']:.1f} / {results.quiet_alone_ms['p99']:.1f}",
        f"{results.quiet_beside_ms['p50']:.1f} / {results.quiet_beside_ms['p99']:.1f}",
        f"{sum(results.noisy_failures.values())} / {sum(results.quiet_failures.values())}",
    )
    return [
        Table("refusals", ("sent", "p50 ms", "p99 ms"), refusals),
        Table(
            "cost",
            ("connections", "requests/s without keys", "with keys", "cost, median of rounds"),
            [cost],
        ),
        Table(
            "noisy",
            (
                "limit, requests/s", "answered/s", "refused/s", "other key alone, p50 / p99 ms",
                "beside it", "other failures, limited / other key",
            ),
            [noisy],
        ),
    ]  # fmt: skip
