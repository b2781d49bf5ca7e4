"""The queue of generations learns from jobs that end, and forgets those that leave it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import SchedulingSettings
from deployments.deadlines import deadline_after
from deployments.errors import Overloaded
from deployments.generation.admission import AdmissionQueue
from deployments.safety_factor import LATE_STEP, TARGET_SHARE, Prediction
from tests.support.fakes import FakeClock
from tests.unit.deployments.generation.test_forecast import demand, measured

PREDICTED_S, TIMEOUT_S = 2.0, 4.0
LATE_S = 3.0  # more than the safety factor times PREDICTED_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("deployments.deadlines.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def queue(clock: FakeClock) -> AdmissionQueue:
    return AdmissionQueue(measured(), slots=2)


def push(queue: AdmissionQueue, number: int, max_waiting_requests: int = 10) -> list[int]:
    """Queue a job. Return the numbers of the jobs that this displaces."""
    deadline_s = deadline_after(TIMEOUT_S)
    job: Any = SimpleNamespace(
        number=number,
        demand=demand(10),
        client="",
        priority=0,
        slot_count=1,
        deadline_s=deadline_s,
    )
    prediction = Prediction(PREDICTED_S, TIMEOUT_S, deadline_s)
    settings = SchedulingSettings(max_waiting_requests=max_waiting_requests)
    return [each.job.number for each in queue.push(job, prediction, settings)]


def needed_s(queue: AdmissionQueue) -> float:
    """Return the seconds that a new job needs by the estimate of its refusal."""
    running: Any = SimpleNamespace(demand=demand(10))
    hurried = demand(10)._replace(deadline_s=deadline_after(0.1))
    with pytest.raises(Overloaded) as refused:
        queue.check(hurried, [running], SchedulingSettings())
    assert refused.value.needed_s is not None
    return refused.value.needed_s


def test_decode_steps_between_prefill_chunks_delay_a_job(queue: AdmissionQueue) -> None:
    running: Any = SimpleNamespace(demand=demand(10))
    long = demand(10, prompt=100)._replace(deadline_s=deadline_after(60))
    prediction = queue.check(long, [running], SchedulingSettings(max_prefill_stall_ms=20.0))
    # 1 s of prefill in 50 chunks of 20 ms. A step of 0.1 s follows each, then 10 steps of 0.2 s.
    assert prediction.seconds == pytest.approx(1 + 50 * 0.1 + 10 * 0.2)


def test_retry_after_of_a_full_queue_is_the_time_until_a_slot_is_free(
    queue: AdmissionQueue,
) -> None:
    push(queue, 0)
    with pytest.raises(Overloaded, match="queue is full") as refused:
        queue.check(demand(100), [], SchedulingSettings(max_waiting_requests=1))
    # 100 steps of 0.2 s over two slots: on average, a job ends every 10 s.
    assert refused.value.retry_after_s == pytest.approx(100 * 0.2 / 2)


def test_late_end_of_a_job_tightens_admission_once(queue: AdmissionQueue, clock: FakeClock) -> None:
    push(queue, 0)
    assert queue.take(1)
    before_s = needed_s(queue)
    clock.now_s += LATE_S
    for _ in range(2):
        queue.record_end(0)
    assert needed_s(queue) == pytest.approx(before_s * (1 + LATE_STEP * TARGET_SHARE))


def test_job_that_is_dropped_after_its_deadline_tightens_admission(
    queue: AdmissionQueue, clock: FakeClock
) -> None:
    before_s = needed_s(queue)
    push(queue, 0)
    clock.now_s += TIMEOUT_S + 1
    assert [each.job.number for each in queue.drop_late(used_slots=1)] == [0]
    assert needed_s(queue) == pytest.approx(before_s * (1 + LATE_STEP * TARGET_SHARE))


def test_displaced_job_is_forgotten(queue: AdmissionQueue, clock: FakeClock) -> None:
    assert push(queue, 0) == []
    assert push(queue, 1, max_waiting_requests=1) == [1]
    before_s = needed_s(queue)
    clock.now_s += LATE_S
    queue.record_end(1)
    assert needed_s(queue) == before_s


@pytest.mark.parametrize("has_slot", [False, True])
def test_job_of_a_client_that_left_is_forgotten(
    queue: AdmissionQueue, clock: FakeClock, *, has_slot: bool
) -> None:
    push(queue, 0)
    if has_slot:
        queue.take(1)
    queue.discard([0])
    assert len(queue) == 0
    before_s = needed_s(queue)
    clock.now_s += LATE_S
    queue.record_end(0)
    assert needed_s(queue) == before_s
