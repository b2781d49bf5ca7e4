"""A scheduler in virtual time: a fake decoder whose calls advance a clock.

Minutes of virtual overload take seconds of real time. Every run has the same results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from deployments.config import SchedulingSettings
from deployments.engines.decoder import Logits, TokenColumn
from deployments.errors import Overloaded, ServeError
from deployments.generation.job import SamplingJob
from deployments.generation.scheduler import GenerationScheduler
from deployments.generation.step_results import JobEvent
from deployments.health import WorkerHealth
from deployments.messages import Chunk, GenerationOptions, SamplingParams
from tests.support.fake_decoder import VOCABULARY, FakeDecoder
from tests.support.fakes import ListRecorder
from tests.support.scheduler_harness import END, GREEDY, build_model_context

SLOTS = 8
PREFILL_TOKEN_S = 0.001
# Seconds of a decode step, and additional seconds per slot: 12 ms for one slot, 26 ms for eight
# slots. SmolLM2-135M takes as long on two cores.
STEP_S, STEP_SLOT_S = 0.010, 0.002


class VirtualClock:
    """Replacement of the module `time` in the modules of a scheduler."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000_000.0
        for module in ("scheduler", "step_executor", "prefill", "job"):
            patch.setattr(f"deployments.generation.{module}.time", self)
        patch.setattr("deployments.deadlines.time", self)
        patch.setattr("deployments.health.time", self)

    def time(self) -> float:
        return self.now_s

    perf_counter = monotonic = time


class TimedDecoder(FakeDecoder):
    """Decoder whose calls take virtual time. Tokens are END with probability `end_probability`."""

    def __init__(self, clock: VirtualClock, end_probability: float = 0.0) -> None:
        super().__init__(slots=SLOTS, context=4096)
        self._clock = clock
        self._row = np.zeros(VOCABULARY, np.float32)
        odds = end_probability / (1 - end_probability)
        self._row[END] = np.log(odds * (VOCABULARY - 1)) if odds else -100.0

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        self._clock.now_s += PREFILL_TOKEN_S * len(ids)
        return self._row

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        self._clock.now_s += STEP_S + STEP_SLOT_S * len(ids)
        return np.tile(self._row, (len(ids), 1))


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at a given time, independent of earlier answers (open loop)."""

    at_s: float  # after the start
    prompt_tokens: int
    new_tokens: int
    timeout_s: float
    client: str = ""
    priority: int = 0
    seed: int | None = None  # None: greedy, so that the answer has `new_tokens` tokens


@dataclass
class JobOutcome:
    """Outcome of a request. Times are seconds after the start."""

    arrival: Arrival
    ended_s: float = 0.0
    first_token_s: float = 0.0  # 0: no token
    error: ServeError | None = None
    is_rejected: bool = False  # at submission

    @property
    def is_in_time(self) -> bool:
        return self.error is None and self.ended_s <= self.arrival.at_s + self.arrival.timeout_s


class VirtualScheduler:
    """A real GenerationScheduler that replays arrivals, step by step in virtual time."""

    def __init__(self, patch: pytest.MonkeyPatch, *, end_probability: float = 0.0) -> None:
        self.clock = VirtualClock(patch)
        self._start_s = self.clock.now_s
        settings = SchedulingSettings(max_draft_tokens=0)
        self.scheduler = GenerationScheduler(
            TimedDecoder(self.clock, end_probability),
            lambda: settings,
            self._publish,
            ListRecorder(),
            WorkerHealth("tiny/writer"),
        )
        self._model = build_model_context(4096)
        self._outcomes: dict[int, JobOutcome] = {}

    @property
    def elapsed_s(self) -> float:
        return self.clock.now_s - self._start_s

    def replay(self, arrivals: Iterable[Arrival]) -> list[JobOutcome]:
        """Run all arrivals to completion. Return the outcomes in order of arrival."""
        outcomes: list[JobOutcome] = []
        for arrival in arrivals:
            self._run_until(lambda due_s=arrival.at_s: self.elapsed_s >= due_s)
            self.clock.now_s = max(self.clock.now_s, self._start_s + arrival.at_s)
            outcomes.append(self._submit(arrival))
        self._run_until(lambda: False)
        return outcomes

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        while self.scheduler.slot_use != (0, 0) and not is_over():
            self.scheduler.run_step()

    def _submit(self, arrival: Arrival) -> JobOutcome:
        outcome = JobOutcome(arrival)
        # Random prompts share no prefix, so that the prefix cache has no effect.
        prompt = random.Random(len(self._outcomes)).choices(range(END), k=arrival.prompt_tokens)
        sampling = GREEDY if arrival.seed is None else SamplingParams(seed=arrival.seed)
        options = GenerationOptions(sampling=sampling, max_new_tokens=arrival.new_tokens)
        deadline_s = self._start_s + arrival.at_s + arrival.timeout_s
        job = SamplingJob(prompt, options, self._model, None, deadline_s)
        job.client, job.priority = arrival.client, arrival.priority
        self._outcomes[job.number] = outcome
        try:
            self.scheduler.submit(job)
        except Overloaded as error:
            outcome.ended_s, outcome.error, outcome.is_rejected = self.elapsed_s, error, True
        return outcome

    def _publish(self, events: Sequence[JobEvent]) -> None:
        for number, payload in events:
            outcome = self._outcomes[number]
            if isinstance(payload, ServeError):
                outcome.ended_s, outcome.error = self.elapsed_s, payload
                continue
            outcome.first_token_s = outcome.first_token_s or self.elapsed_s
            if isinstance(payload, Chunk) and payload.finished is not None:
                outcome.ended_s = self.elapsed_s


def poisson_arrivals(rate: float, seconds: float, seed: int, **fields: object) -> list[Arrival]:
    """Return arrivals at random times, `rate` per second on average."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        arrivals.append(Arrival(at_s=at_s, **fields))  # type: ignore[arg-type]
        at_s += chance.expovariate(rate)
    return arrivals
