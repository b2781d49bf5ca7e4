from __future__ import annotations

import pytest

from benchmarks.overload.open_loop import Exchange, OpenLoopResult
from benchmarks.overload.results import (
    MeasuredLoop,
    OverloadLevel,
    OverloadResults,
    WorkloadResults,
    build_tables,
    evaluate_goals,
    summarize_level,
)
from benchmarks.overload.workloads import WORKLOADS

EXCHANGES = [
    Exchange(0, 0.0, 0.0, 0.5, 200),  # sent before the measured window
    Exchange(1, 1.0, 1.001, 1.5, 200),
    Exchange(0, 1.2, 1.2, 2.9, 200),
    Exchange(1, 1.3, 1.3, 4.0, 200),  # answered after the timeout of 2 s
    Exchange(0, 1.4, 1.4, 1.41, 429),
    Exchange(1, 1.5, 1.5, None, 0),
]


def level(rounds: int = 1) -> OverloadLevel:
    result = OpenLoopResult(EXCHANGES, cpu_s=0.5, elapsed_s=5.0)
    loops = [MeasuredLoop(result, capacity, wrong=1) for capacity in (1.1, 1.5)[:rounds]]
    return summarize_level(loops, factor=3.0, timeout_s=2.0, window_s=(1.0, 3.0))


def test_goodput_counts_answers_in_time_within_the_window() -> None:
    summary = level()
    assert summary.goodput_per_s == 1.0
    assert summary.offered_per_s == 2.0
    assert summary.statuses == {"200": 4, "429": 1, "none": 1}
    assert summary.late == 1
    assert summary.refusal_ms["p99"] == pytest.approx(10)
    assert summary.client_cores == 0.1


def test_times_count_from_the_due_time() -> None:
    waited = [
        Exchange(0, 0.1, 1.3, 1.6, 200),  # connected after 1.2 s; in time if counted from sending
        Exchange(1, 0.2, 1.4, 1.5, 429),
    ]
    loop = MeasuredLoop(OpenLoopResult(waited, cpu_s=0.5, elapsed_s=5.0), 1.0, wrong=0)
    summary = summarize_level([loop], factor=3.0, timeout_s=1.0, window_s=(1.0, 3.0))
    assert (summary.goodput_per_s, summary.late) == (0, 1)
    assert summary.refusal_ms["p99"] == pytest.approx(1_300)
    assert summary.send_lag_ms["p50"] == pytest.approx(1_200)


def test_errors_of_connections_are_named() -> None:
    exchanges = [Exchange(0, 0.1, error="EMFILE"), Exchange(0, 0.1, 0.1), Exchange(0, 0.2, 0.2)]
    loop = MeasuredLoop(OpenLoopResult(exchanges, cpu_s=0.5, elapsed_s=5.0), 1.0, wrong=0)
    summary = summarize_level([loop], factor=3.0, timeout_s=1.0, window_s=(1.0, 3.0))
    workload = WorkloadResults(
        name="sentences",
        timeout_s=1.0,
        capacities_per_s=(1.0,),
        memory_mib=(1.0,),
        levels=(summary,),
    )
    table, _ = build_tables(OverloadResults(url="http://127.0.0.1:8000", workloads=(workload,)))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["no answer"] == "1 x EMFILE, 2 x none"


def test_rounds_of_a_load_are_summarized_together() -> None:
    once, twice = level(), level(rounds=2)
    assert twice.goodput_per_s == once.goodput_per_s
    assert twice.offered_per_s == once.offered_per_s
    assert (twice.late, twice.wrong) == (2 * once.late, 2 * once.wrong)
    assert twice.share == pytest.approx(1 / 1.3)


def test_tables_and_goals_compare_with_the_capacity() -> None:
    workload = WorkloadResults(
        name="short answers",
        timeout_s=2.0,
        capacities_per_s=(1.0, 123.4),
        memory_mib=(100.0, 101.0),
        levels=(level(),),
    )
    results = OverloadResults(url="http://127.0.0.1:8000", workloads=(workload,))
    levels, servers = build_tables(results)
    assert levels.rows[0][:5] == ["short answers", "3 x", "2.0", "1.00", "91%"]
    assert servers.rows[0][-2:] == ("1 / 123", "100 / 101")
    assert [goal.reached for goal in evaluate_goals(results)] == [True, True]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_compare_answers(name: str) -> None:
    workload = WORKLOADS[name]([f"Sentence {n}." for n in range(300)])
    assert len(set(workload.bodies)) == len(workload.bodies)
    if name == "sentences":
        same, other = [[1.0, 0.0]], [[0.0, 1.0]]
    else:
        same, other = ({"choices": [{"text": text}]} for text in ("a", "b"))
    assert workload.is_equal(same, same)
    assert not workload.is_equal(same, other)
