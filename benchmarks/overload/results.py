"""Results of the overload benchmark as values and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from benchmarks.common.report import Table, format_counts, format_number
from benchmarks.common.statistics import Goal, percentiles_ms
from benchmarks.overload.open_loop import OpenLoopResult

REFUSALS = (429, 503)
MIN_GOODPUT = 0.9  # minimum goodput as a share of the capacity
MAX_REFUSAL_MS = 50.0  # maximum latency of refusals at the 99th percentile


class MeasuredLoop(NamedTuple):
    """One open loop. Its capacity is the mean of the capacities before and after it."""

    result: OpenLoopResult
    capacity_per_s: float
    wrong: int  # sampled answers that differ from the expected answer


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadLevel:
    """Summary of all open loops at one multiple of the capacity.

    `goodput_per_s` covers the measured windows only. All other values cover all requests. Times of
    answers count from the due time of the request: a wait for a connection is part of them.
    """

    factor: float
    capacity_per_s: float
    offered_per_s: float
    goodput_per_s: float  # rate of answers within the deadline of their request
    # Keys: HTTP statuses, errors of connections such as `ECONNREFUSED`, and `none` for every other
    # request without an answer.
    statuses: Mapping[str, int]
    late: int  # number of answers after the deadline
    wrong: int  # sampled answers that differ from the expected answer
    refusal_ms: Mapping[str, float]  # p50 to p99, from the due time to refusal; may be empty
    send_lag_ms: Mapping[str, float]  # p50 to p99, from the due time to sending
    client_cores: float  # CPU cores that the load generator uses on average

    @property
    def share(self) -> float:
        """Goodput divided by capacity."""
        return self.goodput_per_s / self.capacity_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResults:
    """Results of all open loops of a workload."""

    name: str
    timeout_s: float
    capacities_per_s: tuple[float, ...]  # measured before the first open loop and after each one
    memory_mib: tuple[float, ...]  # memory of the server before the first open loop and after each
    levels: tuple[OverloadLevel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadResults:
    """Results of the overload benchmark, as written to the result file."""

    url: str
    workloads: tuple[WorkloadResults, ...]


def summarize_level(
    loops: Sequence[MeasuredLoop], *, factor: float, timeout_s: float, window_s: tuple[float, float]
) -> OverloadLevel:
    """Summarize the open loops at one multiple of the capacity.

    `window_s` holds the start and end of the measured window, in seconds since a loop began.
    """
    begin_s, end_s = window_s
    exchanges = [each for loop in loops for each in loop.result.exchanges]
    ended = [
        (each.status, each.ended_s, each.ended_s - each.due_s)
        for each in exchanges
        if each.ended_s is not None
    ]
    lags = [each.sent_s - each.due_s for each in exchanges if each.sent_s is not None]
    answered = [
        (ended_s, seconds <= timeout_s) for status, ended_s, seconds in ended if status == 200
    ]
    good = sum(in_time and begin_s <= ended_s < end_s for ended_s, in_time in answered)
    return OverloadLevel(
        factor=factor,
        capacity_per_s=mean(loop.capacity_per_s for loop in loops),
        offered_per_s=len(exchanges) / (end_s * len(loops)),
        goodput_per_s=good / ((end_s - begin_s) * len(loops)),
        statuses=Counter(str(each.status or each.error or "none") for each in exchanges),
        late=sum(not in_time for _, in_time in answered),
        wrong=sum(loop.wrong for loop in loops),
        refusal_ms=percentiles_ms([seconds for status, _, seconds in ended if status in REFUSALS]),
        send_lag_ms=percentiles_ms(lags),
        client_cores=mean(loop.result.cpu_s / loop.result.elapsed_s for loop in loops),
    )


def build_tables(results: OverloadResults) -> tuple[Table, ...]:
    header = ("workload", "load", "offered/s", "goodput/s", "of capacity", "refusals p50 / p99 ms",
              "answers late", "no answer", "wrong", "client cores", "lag p99 ms")  # fmt: skip
    rows = [
        _level_row(workload, level) for workload in results.workloads for level in workload.levels
    ]
    memory = [
        (
            each.name,
            f"{each.timeout_s:g} s",
            _list_values(each.capacities_per_s),
            _list_values(each.memory_mib),
        )
        for each in results.workloads
    ]
    columns = ("workload", "deadline", "capacity/s, in order", "server MiB, in order")
    return Table("levels", header, rows), Table("servers", columns, memory)


def _list_values(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values)


def _level_row(workload: WorkloadResults, level: OverloadLevel) -> list[str]:
    refusal = level.refusal_ms
    unanswered = {reason: n for reason, n in level.statuses.items() if not reason.isdigit()}
    return [
        workload.name,
        f"{level.factor:g} x",
        format_number(level.offered_per_s, 1),
        format_number(level.goodput_per_s, 2),
        f"{level.share:.0%}",
        f"{refusal['p50']:.1f} / {refusal['p99']:.1f}" if refusal else "-",
        str(level.late),
        format_counts(unanswered),
        str(level.wrong),
        f"{level.client_cores:.2f}",
        f"{level.send_lag_ms['p99']:.1f}" if level.send_lag_ms else "-",
    ]


def evaluate_goals(results: OverloadResults) -> list[Goal]:
    goals = []
    for workload in results.workloads:
        for level in workload.levels:
            name = f"{workload.name} x {level.factor:g}"
            goals.append(Goal.at_least(f"{name}: goodput / capacity", level.share, MIN_GOODPUT))
            if level.refusal_ms:
                p99 = level.refusal_ms["p99"]
                goals.append(Goal.at_most(f"{name}: p99 of refusals, ms", p99, MAX_REFUSAL_MS))
    return goals


def describe(results: OverloadResults) -> str:
    """Return the console text: all tables and goals."""
    tables = [table.text for table in build_tables(results)]
    return "\n\n".join([*tables, "\n".join(goal.sentence for goal in evaluate_goals(results))])
