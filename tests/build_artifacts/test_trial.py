"""Who is tried first after a short contest."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from build_artifacts.search.trial import Trial


def test_a_factor_counts_the_same_at_every_length() -> None:
    trial = Trial(times_ms={"even": (2.0, 50.0), "uneven": (1.0, 100.0)})
    assert trial.mean_ms("even") == pytest.approx(10)
    assert trial.mean_ms("uneven") == pytest.approx(10)


def test_who_is_fastest_somewhere_comes_before_who_is_fast_everywhere() -> None:
    trial = Trial(
        times_ms={
            "second everywhere": (1.1, 1.1, 1.1),
            "short texts": (1.0, 3.0, 3.0),
            "long texts": (9.0, 1.0, 1.0),
            "last": (10.0, 10.0, 10.0),
        }
    )
    assert trial.fastest() == {"short texts", "long texts"}
    assert trial.order() == ["short texts", "long texts", "second everywhere", "last"]
    assert trial.describe().startswith("short texts 2.08 ms, long texts 2.08 ms, second")


def test_of_equally_fast_ones_the_first_is_the_fastest() -> None:
    assert Trial(times_ms={"first": (1.0,), "second": (1.0,)}).fastest() == {"first"}


def test_a_trial_that_nobody_finished_has_no_order() -> None:
    assert Trial(times_ms={}).order() == []


def test_a_trial_is_kept_as_it_was() -> None:
    trial = Trial(times_ms={"one": (1.5, 2.5)})
    assert Trial.model_validate_json(trial.model_dump_json()) == trial
    with pytest.raises(ValidationError):
        Trial.model_validate_json('{"times_ms": {"one": ["fast"]}}')
