"""Admission by predicted ends learns from the calls that end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.batching.deadline_admission import DeadlineAdmission
from deployments.deadlines import deadline_after
from deployments.errors import EngineFailed, Overloaded
from deployments.fair_queue import FairQueue
from deployments.safety_factor import MIN_FACTOR
from tests.support.fakes import FakeClock

SENDER = ("alice", 0)
PREDICTED_S = 2.0
EARLY_S, LATE_S = 0.5 * PREDICTED_S, 2 * PREDICTED_S


class LearningAdmission:
    """Admission of calls that are predicted to take PREDICTED_S behind a waiting call."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        queue: FairQueue[Any] = FairQueue()
        queue.push("waiting", cost=PREDICTED_S / 2, client="alice")
        self._admission = DeadlineAdmission(queue)

    def run(self, outcome: str, took_s: float) -> None:
        """Admit a call that ends after `took_s`."""
        prediction = self._admission.predict(
            PREDICTED_S / 2, deadline_after(3 * PREDICTED_S), SENDER, 0.0
        )
        self._clock.now_s += took_s
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if outcome == "answered":
            done.set_result("outputs")
        elif outcome == "failed":
            done.set_exception(EngineFailed("failed"))
        else:
            done.cancel()
        self._admission.record_end(prediction, done)

    @property
    def factor(self) -> float:
        """The factor by which a refusal exceeds the prediction."""
        with pytest.raises(Overloaded) as refused:
            self._admission.predict(PREDICTED_S / 2, deadline_after(PREDICTED_S), SENDER, 0.0)
        assert refused.value.needed_s is not None
        return refused.value.needed_s / PREDICTED_S


@pytest.fixture
def admission(monkeypatch: pytest.MonkeyPatch) -> LearningAdmission:
    clock = FakeClock()
    monkeypatch.setattr("deployments.deadlines.time", SimpleNamespace(monotonic=clock))
    return LearningAdmission(clock)


@pytest.mark.parametrize("outcome", ["answered", "failed", "cancelled"])
async def test_late_calls_tighten_admission_however_they_end(
    admission: LearningAdmission, outcome: str
) -> None:
    assert admission.factor == pytest.approx(MIN_FACTOR)
    admission.run(outcome, LATE_S)
    assert admission.factor > 1.01 * MIN_FACTOR


async def test_calls_that_are_answered_in_time_relax_admission_after_an_overload(
    admission: LearningAdmission,
) -> None:
    for _ in range(5):
        admission.run("cancelled", LATE_S)
    for _ in range(200):
        admission.run("answered", EARLY_S)
    assert admission.factor == pytest.approx(MIN_FACTOR)


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
async def test_calls_that_end_early_without_an_answer_teach_nothing(
    admission: LearningAdmission, outcome: str
) -> None:
    for _ in range(5):
        admission.run("cancelled", LATE_S)
    tightened = admission.factor
    for _ in range(200):
        admission.run(outcome, EARLY_S)
    assert admission.factor == tightened
