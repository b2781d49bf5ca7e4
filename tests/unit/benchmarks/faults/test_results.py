"""Summary, goals and table of injected process faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.faults.load import RIGHT, WRONG, Observation
from benchmarks.faults.results import FaultResult, build_table, merge, summarize_fault
from benchmarks.servers.process_kinds import KINDS

PLAIN, PORT = KINDS["encoder"], KINDS["haproxy"]


def observe(outcome: str, started_s: float, seconds: float) -> Observation:
    return Observation("encoder", outcome, started_s, started_s + seconds)


def test_summary_counts_what_failed_and_was_slow() -> None:
    observations = [
        observe(RIGHT, 8.0, 0.1),
        observe("503", 10.0, 0.5),
        observe(RIGHT, 10.0, 4.0),
        observe("0", 11.0, 0.1),
    ]
    result = summarize_fault(PLAIN, "kill", observations, fault_s=10.0, successor_s=3.0)
    assert result.answered == 0.5
    assert result.outcomes == {"encoder 503": 1, "encoder 0": 1}
    assert (result.worst_s, result.disturbed_s) == (4.0, 4.0)
    assert not result.is_reached


def test_waits_without_a_right_answer_are_not_called_waits_for_one() -> None:
    observations = [observe(RIGHT, 10.0, 0.1), observe("-1", 10.0, 60.0)]
    result = summarize_fault(PLAIN, "kill", observations, fault_s=10.0, successor_s=None)
    table = build_table([result])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["slowest right answer"], row["disturbed for"]) == ("0.1 s", "60.0 s")


def test_undisturbed_fault_lasts_no_time() -> None:
    result = summarize_fault(PLAIN, "stop", [observe(RIGHT, 1.0, 0.1)], 0.5, None)
    assert (result.disturbed_s, result.answered) == (0.0, 1.0)
    assert result.is_reached


@pytest.mark.parametrize(
    ("outcome", "seconds", "reached"), [("503", 1.5, True), ("503", 2.5, False), (WRONG, 0, False)]
)
def test_goal_of_the_port_is_a_time(outcome: str, seconds: float, reached: bool) -> None:
    result = summarize_fault(PORT, "kill", [observe(outcome, 5.0, seconds)], 5.0, 0.1)
    assert result.is_reached is reached


def build_result(kind: str) -> FaultResult:
    return summarize_fault(KINDS[kind], "kill", [observe(RIGHT, 1.0, 0.1)], 0.0, None)


def test_merge_replaces_equal_faults_in_the_order_of_the_kinds() -> None:
    former = [build_result(kind) for kind in ("gcs", "encoder")]
    new = replace(build_result("encoder"), requests=7)
    merged = merge(former, [new, build_result("tokenizer")])
    assert [one.kind for one in merged] == ["encoder", "tokenizer", "gcs"]
    assert merged[0].requests == 7


def test_table_has_a_row_per_fault() -> None:
    table = build_table([build_result("gcs")])
    assert table.rows[0][:5] == ("gcs", "kill -9", "1", "100.00 %", "0")
    assert table.rows[0][-1] == "20 s: reached"
