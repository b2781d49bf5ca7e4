"""Queue of jobs that wait for one decoder. It rejects and drops jobs that would end too late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deployments.config import SchedulingSettings
from deployments.deadlines import is_expired, remaining_s
from deployments.errors import DeadlineExceeded, Overloaded, ServeError, build_overloaded
from deployments.fair_queue import FairQueue
from deployments.generation.forecast import Forecast
from deployments.generation.job import Demand, Job
from deployments.safety_factor import Prediction, build_safety_factors


class DroppedJob(NamedTuple):
    """A job that leaves the queue without a KV slot, and the error for its client."""

    job: Job
    error: ServeError


class AdmissionQueue:
    """Waiting jobs in an order that is fair between clients. Not thread-safe."""

    def __init__(self, forecast: Forecast, slots: int) -> None:
        self._forecast = forecast
        self._slots = slots
        self._jobs: FairQueue[Job] = FairQueue()
        self._safety_factors = build_safety_factors()
        self._predictions: dict[int, Prediction] = {}  # of waiting and running jobs, by job number

    def __len__(self) -> int:
        return len(self._jobs)

    def predict_s(self) -> float:
        """Predict the decoder time of all waiting jobs in seconds; 0 before a measurement."""
        if not self._forecast.is_measured:
            return 0.0
        return sum(self._forecast.price(job.demand) for job in self._jobs)

    @property
    def waiting_s(self) -> float:
        """Decoder time of all waiting jobs in seconds, as predicted when each job was queued.

        Unlike `predict_s`, this property does not iterate over all jobs.
        """
        return self._jobs.cost

    def check(
        self, demand: Demand, running: Sequence[Job], settings: SchedulingSettings
    ) -> Prediction:
        """Predict the time to a job's end. Raise Overloaded if it is too long or the queue is full.

        The time is too long if the safety factor times the prediction exceeds the time until the
        deadline. The queue is full for a job if too many jobs are ahead of it. An idle decoder
        admits every job, because a later retry could not end sooner.
        """
        left_s = remaining_s(demand.deadline_s)
        client, priority = demand.client, demand.priority
        if not running and not self._jobs:
            return Prediction(0.0, left_s, demand.deadline_s, priority)
        cost = self._forecast.price(demand)
        count = self._jobs.count_ahead(cost=cost, client=client, priority=priority)
        if count >= settings.max_waiting_requests:
            raise self._full(demand, settings)
        ahead = self._jobs.ahead(cost=cost, client=client, priority=priority)
        predicted_s = self._forecast.predict_end_s(
            demand,
            (job.demand for job in running),
            (job.demand for job in ahead),
            settings.max_prefill_stall_ms / 1e3,
        )
        needed_s = self._safety_factors[priority].value * predicted_s
        if needed_s > left_s:
            raise build_overloaded(
                f"The answer would take about {needed_s:.1f} s and its deadline is in "
                f"{left_s:.1f} s: {len(running)} requests run and {len(ahead)} wait before it. "
                "Retry later.",
                needed_s - left_s,
                needed_s,
            )
        return Prediction(predicted_s, left_s, demand.deadline_s, priority)

    def push(
        self, job: Job, prediction: Prediction, settings: SchedulingSettings
    ) -> list[DroppedJob]:
        """Queue a job. If the queue then exceeds its limit, drop the last job and return it."""
        cost = self._forecast.price(job.demand)
        self._predictions[job.number] = prediction
        self._jobs.push(job, cost=cost, client=job.client, priority=job.priority)
        if len(self._jobs) <= settings.max_waiting_requests:
            return []
        last = self._jobs.take_last()
        del self._predictions[last.number]
        return [DroppedJob(last, self._full(last.demand, settings))]

    def take(self, free_slots: int) -> Job | None:
        """Take the first job if it fits `free_slots`, else return None.

        Later jobs do not overtake a first job that does not fit.
        """
        first = self._jobs.first
        if first is None or first.slot_count > free_slots:
            return None
        return self._jobs.take_first()

    def record_end(self, number: int) -> None:
        """Update the safety factor at the end of a job, whether it was answered or dropped."""
        if (prediction := self._predictions.pop(number, None)) is not None:
            self._safety_factors[prediction.priority].record_end(prediction)

    def discard(self, numbers: Iterable[int]) -> None:
        """Delete the predictions of the jobs with these numbers, and the jobs that still wait."""
        unwanted = set(numbers)
        for number in unwanted:
            self._predictions.pop(number, None)
        if unwanted:
            self._jobs.discard(lambda job: job.number in unwanted)

    def drop_late(self, used_slots: int) -> list[DroppedJob]:
        """Remove expired jobs, and jobs at the head of the queue that cannot keep their deadline.

        Return them with their errors. The head has as many jobs as the decoder has slots. While no
        slot is used, remove only expired jobs: any other job can start now, and a retry of it could
        not end sooner.
        """
        dropped = [
            DroppedJob(job, DeadlineExceeded("the deadline passed in the generation queue"))
            for job in self._jobs
            if is_expired(job.deadline_s)
        ]
        late = {each.job.number for each in dropped}
        for job in self._jobs.peek(self._slots) if used_slots else ():
            needed_s = self._forecast.predict_service_s(job.demand, used_slots)
            lacking_s = needed_s - remaining_s(job.deadline_s)
            if lacking_s > 0 and job.number not in late:
                error = build_overloaded(
                    f"The answer would take about {needed_s:.1f} s, {lacking_s:.1f} s more than "
                    "its deadline allows after the wait for a KV slot. Retry later.",
                    lacking_s,
                )
                dropped.append(DroppedJob(job, error))
        for each in dropped:
            self.record_end(each.job.number)
        self.discard(each.job.number for each in dropped)
        return dropped

    def _full(self, demand: Demand, settings: SchedulingSettings) -> Overloaded:
        limit = settings.max_waiting_requests
        free_slot_s = self._forecast.predict_service_s(demand, self._slots) / self._slots
        return build_overloaded(
            f"The generation queue is full: {limit} requests wait, the maximum is {limit}. "
            "Retry later.",
            free_slot_s,
        )
