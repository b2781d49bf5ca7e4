from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import Goal
from benchmarks.graphs.tuning import TuningResults, check_selection, describe, evaluate_goal
from deployments.tuning.costs import Cost, Shape, Variant

SMALL, LARGE = Shape(items=1, tokens=16), Shape(items=8, tokens=128)
TTFT, SECOND = Variant(candidate="first"), Variant(candidate="second", arena=True)
WINNERS = ((SMALL, TTFT), (LARGE, SECOND))


def costs(*ms: float) -> tuple[Cost, ...]:
    return tuple(
        Cost(shape=shape, median_ms=time, low_ms=time, rounds=5)
        for shape, time in zip((SMALL, LARGE), ms, strict=False)
    )


def test_winners_are_held_against_the_fastest_of_now() -> None:
    found = check_selection(WINNERS, {"first": costs(1.0, 8.0), "second+arena": costs(0.8, 9.0)})
    assert [(one.shape, one.winner, one.fastest) for one in found] == [
        ("1x16", "first", "second+arena"),
        ("8x128", "second+arena", "first"),
    ]
    assert [one.ratio for one in found] == pytest.approx([1.25, 1.125])
    assert evaluate_goal(found) == Goal.at_most("winner / fastest at the worst shape", 1.25, 1.05)


def test_shapes_without_time_do_not_count() -> None:
    found = check_selection(WINNERS, {"first": costs(1.0), "second+arena": costs(1.04)})
    assert [one.shape for one in found] == ["1x16"]
    assert evaluate_goal(found).reached
    assert evaluate_goal(()).reached is None


def test_a_winner_that_cannot_run_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match=r"`second\+arena` wins at 8x128"):
        check_selection(WINNERS, {"first": costs(1.0, 8.0)})


def test_the_table_counts_the_near_ones() -> None:
    found = check_selection(WINNERS, {"first": costs(1.0, 8.0), "second+arena": costs(2.0, 9.0)})
    text = describe(
        TuningResults(
            model_id="org/model",
            version="0123",
            table="cpu-1.json",
            threads=1,
            seconds=1.0,
            measured=("first", "second+arena"),
            left_out={"third": "not right"},
            check_selection=found,
            unmeasured=("32x512",),
            goal=evaluate_goal(found),
        )
    )
    assert "1 of 2 shapes within 5%" in text
    assert "left out: third: not right" in text
    assert "no time for 32x512" in text
    assert text.endswith("winner / fastest at the worst shape: 1.125, at most 1.05: missed")
