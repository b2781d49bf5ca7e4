"""Load around a fault, with a fake cluster, and the goal."""

from __future__ import annotations

import threading

import pytest

from benchmarks.common.http import ServerAddress
from benchmarks.faults.load import CUT, RIGHT, WRONG, Observation, SteadyLoad
from benchmarks.pods import command
from benchmarks.pods.command import build_table, observe, summarize


def list_observations(**outcomes: int) -> list[Observation]:
    return [
        Observation("encoder", outcome, 0.0, number / 100)
        for outcome, count in outcomes.items()
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("outcomes", "is_reached"),
    [
        ({RIGHT: 10}, True),
        ({RIGHT: 9990, "503": 10}, True),
        ({RIGHT: 9989, "503": 11}, False),
        ({RIGHT: 9999, WRONG: 1}, False),
        ({CUT: 1}, False),
    ],
    ids=repr,
)
def test_goal_is_a_share_of_right_answers_and_no_wrong_one(
    outcomes: dict[str, int], is_reached: bool
) -> None:
    result = summarize("kill", list_observations(**outcomes))
    assert result.is_reached is is_reached
    assert build_table([result]).rows[0][-1] == ("reached" if is_reached else "missed")


def test_result_has_the_waits_for_right_answers() -> None:
    result = summarize("drain", [*list_observations(right=3), *list_observations(cut=50)])
    assert (result.requests, dict(result.failed)) == (53, {CUT: 50})
    assert (result.median_s, result.worst_s) == (0.02, 0.03)


async def test_fault_comes_amid_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEAD_S", 0.0)
    caused: list[int] = []
    load = SteadyLoad(ServerAddress("127.0.0.1", 9))
    monkeypatch.setattr(load, "start", lambda requests, rate: caused.append(len(requests)))
    observations = await observe(load, [], 5, lambda: caused.append(threading.get_ident()), 0.0)
    assert observations == []
    assert caused[0] == 0
    assert caused[1] != threading.get_ident(), "the load goes on meanwhile"
