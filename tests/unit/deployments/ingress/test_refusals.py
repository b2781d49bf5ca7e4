from __future__ import annotations

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import Overloaded, build_overloaded
from deployments.ingress.refusals import MAX_KEPT, RecentRefusals

QUEUE = ("cpu", "client", None)


@pytest.fixture
def refusals() -> RecentRefusals:
    """Return refusals with one request of 100 characters, predicted to end after 40 s."""
    made = RecentRefusals()
    made.note(QUEUE, 100, build_overloaded("full", 10.0, 40.0))
    return made


def test_request_like_a_refused_one_is_refused_with_the_estimate(refusals: RecentRefusals) -> None:
    with pytest.raises(Overloaded) as refused:
        refusals.check(QUEUE, 100, deadline_after(30.0))
    assert refused.value.retry_after_s == pytest.approx(10, abs=1)


@pytest.mark.parametrize(
    ("queue", "size", "timeout_s"),
    [
        (QUEUE, 99, 30.0),  # smaller
        (QUEUE, 100, 60.0),  # later deadline
        (("cpu", "other", None), 100, 30.0),
        (("cpu", "client", "batch"), 100, 30.0),
    ],
)
def test_request_that_may_fit_is_sent(
    refusals: RecentRefusals, queue: object, size: int, timeout_s: float
) -> None:
    refusals.check(queue, size, deadline_after(timeout_s))


def test_refusal_without_a_prediction_is_not_repeated() -> None:
    refusals = RecentRefusals()
    refusals.note(QUEUE, 1, Overloaded("full"))
    refusals.check(QUEUE, 1, deadline_after(1.0))


def test_refusals_of_many_clients_are_bounded() -> None:
    refusals = RecentRefusals()
    for number in range(3 * MAX_KEPT):
        refusals.note(number, 1, build_overloaded("full", 1.0, 5.0))
    assert len(refusals._refusals) == MAX_KEPT


def test_new_refusals_replace_the_expired_ones_at_the_limit(refusals: RecentRefusals) -> None:
    for number in range(MAX_KEPT - 1):
        refusals.note(number, 1, build_overloaded("full", 1.0, 0.0))
    refusals.note("new", 1, build_overloaded("full", 1.0, 40.0))
    for queue in (QUEUE, "new"):
        with pytest.raises(Overloaded):
            refusals.check(queue, 100, deadline_after(30.0))


def test_known_queue_is_updated_although_no_other_fits(refusals: RecentRefusals) -> None:
    for number in range(MAX_KEPT):
        refusals.note(number, 1, build_overloaded("full", 1.0, 50.0))
    refusals.note(QUEUE, 100, build_overloaded("full", 1.0, 5.0))
    refusals.check(QUEUE, 100, deadline_after(30.0))
