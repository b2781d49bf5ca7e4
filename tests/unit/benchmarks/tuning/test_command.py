from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.statistics import Goal
from benchmarks.tuning.command import TuningResults, check_selection, describe, evaluate_goal
from deployments.tuning.costs import Cost, Shape, Variant

SMALL, LARGE = Shape(items=1, tokens=16), Shape(items=8, tokens=128)
FIRST, SECOND = Variant(candidate="first"), Variant(candidate="second", spinning=True)
SELECTION = ((SMALL, FIRST), (LARGE, SECOND))


def costs(*ms: float) -> tuple[Cost, ...]:
    return tuple(
        Cost(shape=shape, median_ms=time, low_ms=time, rounds=5)
        for shape, time in zip((SMALL, LARGE), ms, strict=False)
    )


def test_check_selection_compares_with_the_fastest() -> None:
    measured = {"first": costs(1.0, 8.0), "second+spinning": costs(0.8, 9.0)}
    check = check_selection(SELECTION, measured)
    assert [(one.shape, one.selected, one.fastest) for one in check] == [
        ("1x16", "first", "second+spinning"),
        ("8x128", "second+spinning", "first"),
    ]
    assert [one.ratio for one in check] == pytest.approx([1.25, 1.125])
    assert evaluate_goal(check) == Goal.at_most("selected / fastest at the worst shape", 1.25, 1.05)


def test_check_selection_ignores_unmeasured_shapes() -> None:
    check = check_selection(SELECTION, {"first": costs(1.0), "second+spinning": costs(1.04)})
    assert [one.shape for one in check] == ["1x16"]
    assert evaluate_goal(check).reached
    assert evaluate_goal(()).reached is None


def test_check_selection_raises_for_an_unmeasured_selection() -> None:
    with pytest.raises(BenchmarkError, match=r"`second\+spinning` is selected at 8x128"):
        check_selection(SELECTION, {"first": costs(1.0, 8.0)})


def test_describe_counts_shapes_within_the_bound() -> None:
    measured = {"first": costs(1.0, 8.0), "second+spinning": costs(2.0, 9.0)}
    check = check_selection(SELECTION, measured)
    text = describe(
        TuningResults(
            model_id="org/model",
            version="0123",
            cost_table="cpu-1.json",
            threads=1,
            seconds=1.0,
            measured=("first", "second+spinning"),
            skipped={"third": "inaccurate"},
            checks=check,
            unmeasured=("32x512",),
            goal=evaluate_goal(check),
        )
    )
    assert "1 of 2 shapes within 5%" in text
    assert "skipped: third: inaccurate" in text
    assert "not measured for lack of time: 32x512" in text
    assert text.endswith("selected / fastest at the worst shape: 1.125, at most 1.05: missed")
