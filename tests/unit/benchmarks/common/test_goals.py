from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import Goal, require_goals


@pytest.mark.parametrize(
    ("goal", "reached", "sentence"),
    [
        (Goal.at_least("speed", 5.0, 5.0), True, "speed: 5.000, at least 5: reached"),
        (Goal.at_least("speed", 4.999, 5.0), False, "speed: 4.999, at least 5: missed"),
        (Goal.at_most("time", 1.1, 1.1), True, "time: 1.100, at most 1.1: reached"),
        (Goal.at_most("time", 1.2, 1.1), False, "time: 1.200, at most 1.1: missed"),
        (Goal.at_most("time", None, 1.1), None, "time: not measured, at most 1.1"),
    ],
)
def test_goal_sentence_reports_the_result(goal: Goal, reached: bool | None, sentence: str) -> None:
    assert goal.reached is reached
    assert goal.sentence == sentence


def test_goals_that_are_missed_or_not_measured_are_reported() -> None:
    reached, missed = Goal.at_most("a", 1.0, 1), Goal.at_most("b", 2.0, 1)
    unknown = Goal.at_least("c", None, 1)
    require_goals([reached], hint="look")
    with pytest.raises(BenchmarkError) as raised:
        require_goals([reached, missed, unknown], hint="look")
    assert raised.value.message == f"{missed.sentence}; {unknown.sentence}"
    assert raised.value.hint == "look"
