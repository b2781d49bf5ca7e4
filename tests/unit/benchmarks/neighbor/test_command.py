from __future__ import annotations

import numpy as np
import pytest

from benchmarks.neighbor.command import build_table, evaluate_goals
from benchmarks.serving.load import LoadResult
from benchmarks.serving.results import LoadLevel


def load(connections: int, latency_ms: float, failures: int = 0) -> LoadResult:
    """Return the results of a closed loop of 10 s in which every request took `latency_ms`."""
    requests = int(connections * 10e3 / latency_ms)
    return LoadResult(
        connections=connections,
        seconds=10.0,
        latencies_s=np.full(requests, latency_ms / 1e3),
        failures={"429": failures} if failures else {},
        cpu_s=1.0,
    )


def figures(connections: int, *latencies_ms: float, failures: int = 0) -> LoadLevel:
    """Summarize rounds of `load`, one per latency."""
    return LoadLevel.summarize([load(connections, ms, failures) for ms in latencies_ms])


@pytest.mark.parametrize(
    ("quiet_ms", "loud_ms", "reached"),
    [
        (20, 200, [True, True, True]),  # both get 200 requests/s
        (30, 50, [False, False, True]),  # 133 requests/s, `loud` gets 800; the fair share is 200
        (40, 400, [False, True, True]),
    ],
)
def test_goals_are_latency_and_share(quiet_ms: float, loud_ms: float, reached: list[bool]) -> None:
    clients = {
        "quiet, alone": figures(4, 10.0),
        "quiet": figures(4, quiet_ms),
        "loud": figures(40, loud_ms),
    }
    assert [goal.reached for goal in evaluate_goals(clients)] == reached


def test_goals_are_ratios_within_rounds() -> None:
    clients = {
        "quiet, alone": figures(4, 13.3, 14.7, 14.3),
        "quiet": figures(4, 27.8, 32.4, 25.8),
        "loud": figures(40, 300.0, 300.0, 300.0),
    }
    slowdown = evaluate_goals(clients)[0]
    assert slowdown.value == pytest.approx(27.8 / 13.3), "medians would give 27.8 / 14.3 = 1.94"
    assert not slowdown.reached


def test_no_request_of_either_client_may_fail() -> None:
    clients = {
        "quiet, alone": figures(4, 10.0),
        "quiet": figures(4, 15.0),
        "loud": figures(40, 200.0, failures=3),
    }
    assert [goal.reached for goal in evaluate_goals(clients)] == [True, True, False]


def test_table_has_a_row_per_client_with_its_failures() -> None:
    loud = figures(40, 100.0, 100.0, failures=3)
    table = build_table({"quiet": figures(4, 10.0), "loud": loud})
    assert table.rows[0] == ("quiet", "4", "400", "10.00", "10.00", "0")
    assert table.rows[1][-1] == "6 x 429"
