"""Result of each fault, and the table of all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.report import Table
from benchmarks.faults.load import RIGHT, WRONG, Observation
from benchmarks.servers.process_kinds import ACTION_NAMES, KINDS, ProcessFault, ProcessKind

SLOW_S = 1.0  # a longer wait for an answer counts as a disturbance
MIN_ANSWERED = 0.999  # required share of right answers


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """Answers to clients from shortly before one fault until the server has recovered."""

    kind: str
    action: ProcessFault
    requests: int
    outcomes: Mapping[str, int]  # number of requests without a right answer, by kind and outcome
    wrong: int
    worst_s: float  # longest wait for a right answer
    median_s: float  # median wait for a right answer
    # s from the fault to the end of the last request that failed or was slow; 0 if there was none.
    disturbed_s: float
    successor_s: float | None  # s until a new process of the kind was found; None: none was found

    @property
    def answered(self) -> float:
        return 1 - sum(self.outcomes.values()) / self.requests if self.requests else 0.0

    @property
    def max_disturbed_s(self) -> float | None:
        return KINDS[self.kind].max_disturbed_s

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached. No answer may be wrong.

        `answered` must be at least MIN_ANSWERED, or `disturbed_s` at most `max_disturbed_s`.
        """
        if self.wrong:
            return False
        if self.answered >= MIN_ANSWERED:
            return True
        return self.max_disturbed_s is not None and self.disturbed_s <= self.max_disturbed_s


def summarize_fault(
    kind: ProcessKind,
    action: ProcessFault,
    observations: Sequence[Observation],
    fault_s: float,
    successor_s: float | None,
) -> FaultResult:
    """Summarize the observations around a fault at `fault_s` (time.perf_counter)."""
    right = sorted(one.seconds for one in observations if one.outcome == RIGHT)
    failed = Counter(f"{one.kind} {one.outcome}" for one in observations if one.outcome != RIGHT)
    disturbed = [
        one.ended_s - fault_s
        for one in observations
        if one.outcome != RIGHT or one.seconds > SLOW_S
    ]
    return FaultResult(
        kind=kind.name,
        action=action,
        requests=len(observations),
        outcomes=dict(failed),
        wrong=sum(one.outcome == WRONG for one in observations),
        worst_s=right[-1] if right else 0.0,
        median_s=right[len(right) // 2] if right else 0.0,
        disturbed_s=max([0.0, *disturbed]),
        successor_s=successor_s,
    )


def merge(former: Iterable[FaultResult], results: Iterable[FaultResult]) -> list[FaultResult]:
    """Merge results of an earlier run with new results, in the order of ACTION_NAMES and KINDS.

    A new result replaces the earlier result of the same fault.
    """
    merged = {(one.kind, one.action): one for one in (*former, *results)}
    order = [(kind, action) for action in ACTION_NAMES for kind in KINDS]
    return [merged[key] for key in order if key in merged]


def build_table(results: Iterable[FaultResult]) -> Table:
    columns = (
        *("process", "fault", "requests", "answered", "wrong", "slowest right answer"),
        *("disturbed for", "successor after", "goal"),
    )
    return Table("faults", columns, [_build_row(result) for result in results])


def _build_row(result: FaultResult) -> tuple[str, ...]:
    goal = f"{100 * MIN_ANSWERED:g} %"
    if result.max_disturbed_s is not None:
        goal = f"{result.max_disturbed_s:g} s"
    return (
        result.kind,
        ACTION_NAMES[result.action],
        str(result.requests),
        f"{100 * result.answered:.2f} %",
        str(result.wrong),
        f"{result.worst_s:.1f} s",
        f"{result.disturbed_s:.1f} s",
        "-" if result.successor_s is None else f"{result.successor_s:.1f} s",
        f"{goal}: {'reached' if result.is_reached else 'missed'}",
    )
