"""Price of a job as decoder time in seconds, and prediction of the job's end.

A price adds the time of the job's prefill tokens and the time of its expected decode steps, from
measured durations. A prediction simulates the scheduler: running jobs end, waiting jobs take their
KV slots in order, then the new job runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from deployments.generation.job import Demand
from deployments.generation.lengths import AnswerLengths
from deployments.load import WorkRate

# Minimum weight of a new measurement in a mean. A mean thus covers about the last 100 steps, which
# take some seconds and include prefills of several jobs.
_MIN_WEIGHT = 0.01
# Each new prefill multiplies the weight of earlier prefills by this, so the last fifty dominate.
_PREFILL_DECAY = 0.98
# Assumed decoder time per token before the first measurement. The guess is low on purpose: a high
# guess would move the first jobs behind later jobs with measured prices.
GUESS_TOKEN_S = 1e-3


class JobWork(NamedTuple):
    """Work until the end of a job."""

    prompt_tokens: int  # still to prefill
    steps: float  # expected decode steps
    slots: int


class _Average:
    """Mean of recent measurements; 0 before the first one."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(1 / self._count, _MIN_WEIGHT) * (value - self.value)


class StepTimes:
    """Measured durations of the prefills and decode steps of one decoder, in seconds."""

    def __init__(self, slots: int) -> None:
        self._measured = [_Average() for _ in range(slots + 1)]  # s per decode step, by used slots
        self._decode = [0.0] * (slots + 1)  # s per decode step, estimated from `_measured`
        self._mean_decode, self._mean_prefill = _Average(), _Average()  # s per decode step
        self._prefill = WorkRate(_PREFILL_DECAY)

    def record_prefill(self, tokens: int, elapsed_s: float) -> None:
        """Add a prefill of `tokens` prompt tokens, tokens from the prefix cache included."""
        if tokens:
            self._prefill.record(tokens, elapsed_s)

    def record_step(self, sequences: int, decode_s: float, prefill_s: float) -> None:
        """Add a step over `sequences` sequences.

        Both durations are in seconds, divided by the tokens that each sequence gained. A step that
        verifies draft tokens may add several tokens to its sequence.
        """
        self._measured[sequences].add(decode_s)
        self._mean_decode.add(decode_s)
        self._mean_prefill.add(prefill_s)
        self._decode = self._estimate()

    @property
    def prefill_token_s(self) -> float:
        """Predicted seconds of prefill per prompt token."""
        return self._prefill.predict_s(1)

    def decode_s(self, used_slots: int) -> float:
        """Return the expected seconds of one decode step over `used_slots` slots."""
        return self._decode[used_slots]

    def step_s(self, used_slots: int) -> float:
        """Return the seconds of a decode step, with the usual prefills of other jobs before it."""
        mean_s = self._mean_decode.value
        return self._decode[used_slots] * (1 + self._mean_prefill.value / mean_s if mean_s else 1)

    def _estimate(self) -> list[float]:
        """Return seconds per decode step by number of used slots.

        The estimates for fewer slots bound each measured value: a step over twice as many slots
        takes at most twice as long. Without the bound, one slow measurement could keep the decoder
        from ever using that many slots again.
        """
        estimates = [average.value for average in self._measured]
        following = 0.0
        for used in range(len(estimates) - 1, 0, -1):  # not measured: assume the value of used + 1
            following = estimates[used] = estimates[used] or following
        for used in range(2, len(estimates)):
            bound_s = estimates[used - 1] * used / (used - 1)
            estimates[used] = min(estimates[used] or estimates[used - 1], bound_s)
        return estimates


class Forecast:
    """Prices and predictions for one decoder.

    The thread of the scheduler records measurements. Any thread may request predictions.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = AnswerLengths()
        self.times = StepTimes(slots)
        self._slots = slots

    @property
    def is_measured(self) -> bool:
        """Whether prices are measured, not guessed."""
        return self.times.decode_s(self._slots) > 0

    def price(self, demand: Demand) -> float:
        """Return the decoder time in seconds that a job takes when all slots are used; above 0."""
        work, times = self._expect(demand), self.times
        share = work.slots / self._slots
        price_s = self._prefill_s(work.prompt_tokens) + work.steps * share * times.decode_s(
            self._slots
        )
        return price_s or (work.steps + 1) * GUESS_TOKEN_S

    def predict_end_s(
        self,
        demand: Demand,
        running: Iterable[Demand],
        ahead: Iterable[Demand],
        stall_s: float,
    ) -> float:
        """Return the seconds until the end of a job that waits for the jobs `ahead`.

        `stall_s` is the maximum duration of a prefill between two decode steps. Returns 0 without
        measurements.
        """
        times = self.times
        now = [self._expect(job) for job in running]
        used = sum(work.slots for work in now)
        ends = [(work.steps, work.slots) for work in now]  # (decode steps until the end, slots)
        heapify(ends)
        elapsed_s = self._prefill_s(sum(work.prompt_tokens for work in now))
        step = 0.0
        # A long answer for the job itself. For the jobs ahead the mean length suffices, because
        # their lengths average out.
        longest = self.lengths.find_quantile(demand.min_new_tokens, demand.max_new_tokens)
        own = JobWork(demand.prompt_tokens, longest, demand.slots)
        for work in (*map(self._expect, ahead), own):
            while ends and used + work.slots > self._slots:
                end, freed = heappop(ends)
                elapsed_s += (end - step) * times.decode_s(used)
                step, used = end, used - freed
            elapsed_s += self._prefill_s(work.prompt_tokens)
            heappush(ends, (step + work.steps, work.slots))
            used += work.slots
        if used > own.slots:  # other jobs run decode steps between the prefill chunks
            chunks = self._prefill_s(own.prompt_tokens) / stall_s
            elapsed_s += chunks * times.decode_s(used - own.slots)
        return elapsed_s + own.steps * times.step_s(used)

    def predict_service_s(self, demand: Demand, used_slots: int) -> float:
        """Return the seconds from the assignment of KV slots to the end of a job.

        Other jobs use `used_slots` slots meanwhile.
        """
        work = self._expect(demand)
        used = min(used_slots + work.slots, self._slots)
        return self._prefill_s(work.prompt_tokens) + work.steps * self.times.step_s(used)

    def _expect(self, demand: Demand) -> JobWork:
        steps = self.lengths.expect_remaining(
            demand.generated_tokens, demand.min_new_tokens, demand.max_new_tokens
        )
        return JobWork(demand.prompt_tokens, steps, demand.slots)

    def _prefill_s(self, tokens: int) -> float:
        return tokens * self.times.prefill_token_s
