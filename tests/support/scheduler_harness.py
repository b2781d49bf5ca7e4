"""A scheduler over a fake decoder, with a collector of its events."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deployments.config import SchedulingSettings
from deployments.engines.decoder import DecoderEngine
from deployments.errors import ServeError
from deployments.generation.beam_search import BeamSearch
from deployments.generation.job import Job, ModelContext, SamplingJob
from deployments.generation.scheduler import GenerationScheduler
from deployments.generation.step_results import JobEvent
from deployments.health import WorkerHealth
from deployments.messages import BeamSearchParams, Chunk, GenerationOptions, SamplingParams, Started
from deployments.records import StepRecord
from tests.support.fake_decoder import VOCABULARY, FakeDecoder
from tests.support.fakes import ListRecorder, far_deadline

TIMEOUT_S = 240.0  # maximum wait for answers; those of real models take minutes on a busy host
GREEDY = SamplingParams(temperature=0)
END = VOCABULARY - 1
SYSTEM = [n % (VOCABULARY - 1) for n in range(7, 37)]


def build_model_context(context: int) -> ModelContext:
    """Build a model context with a word vocabulary. The last token is the end token."""
    names = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(names, unk_token="w0"))
    return ModelContext(tokenizer, VOCABULARY, (END,), frozenset((END,)), context)


class EventCollector:
    """Collector of the events of a scheduler, by job number."""

    def __init__(self) -> None:
        self.events: dict[int, list[Started | Chunk | ServeError]] = defaultdict(list)
        self._changed = threading.Condition()

    def publish(self, events: Sequence[JobEvent]) -> None:
        with self._changed:
            for job, payload in events:
                self.events[job].append(payload)
            self._changed.notify_all()

    def wait_until_done(self, *jobs: Job) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: all(map(self.is_done, jobs)), TIMEOUT_S)
        assert done, "a job did not finish in time"

    def wait_for_tokens(self, job: Job, count: int) -> None:
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.tokens(job)) >= count, TIMEOUT_S)
        assert enough, "the tokens did not arrive in time"

    def is_done(self, job: Job) -> bool:
        last = next(reversed(self.events[job.number]), None)
        return isinstance(last, ServeError) or (isinstance(last, Chunk) and bool(last.finished))

    def tokens(self, job: Job) -> list[int]:
        chunks = [event for event in self.events[job.number] if isinstance(event, Chunk)]
        return [token.id for chunk in chunks for token in chunk.tokens]

    def started(self, job: Job) -> Started:
        (started,) = (event for event in self.events[job.number] if isinstance(event, Started))
        return started


class SchedulerHarness:
    """A scheduler over a decoder, with a collector of its events."""

    def __init__(self, decoder: DecoderEngine, settings: SchedulingSettings) -> None:
        self.decoder = decoder
        self.collector = EventCollector()
        self.steps: ListRecorder[StepRecord] = ListRecorder()
        self.scheduler = GenerationScheduler(
            decoder,
            lambda: settings,
            self.collector.publish,
            self.steps,
            WorkerHealth("tiny/writer"),
        )
        self._model = build_model_context(decoder.info.context)

    def job(
        self,
        prompt: Sequence[int],
        new_tokens: int = 8,
        *,
        options: GenerationOptions | None = None,
        deadline_s: float | None = None,
        constraint: Any = None,
    ) -> SamplingJob:
        options = options or GenerationOptions(sampling=GREEDY, max_new_tokens=new_tokens)
        return SamplingJob(prompt, options, self._model, constraint, deadline_s or far_deadline())

    def run_jobs(self, *jobs: Job) -> list[list[int]]:
        for job in jobs:
            self.scheduler.submit(job)
        return self._wait_for_answers(jobs)

    def run_together(self, *jobs: Job) -> list[list[int]]:
        """Run jobs. The first call of the FakeDecoder waits until all of them are submitted."""
        self.decoder.held = threading.Event()
        for job in jobs:
            self.scheduler.submit(job)
        self.decoder.held.set()
        return self._wait_for_answers(jobs)

    def _wait_for_answers(self, jobs: Sequence[Job]) -> list[list[int]]:
        self.collector.wait_until_done(*jobs)
        return [self.collector.tokens(job) for job in jobs]


def found_beams(prompt: list[int], beams: int, most: int) -> tuple[int, ...]:
    """Return the best beam. Recompute the KV cache of every beam at each step."""
    search, decoder = BeamSearch(BeamSearchParams(beams), most, (END,)), FakeDecoder(context=200)
    while not search.is_over:
        rows = []
        for tokens in search.running:
            logits = decoder.prefill(0, prompt, 0)
            for place, token in enumerate(tokens):
                logits = decoder.decode(np.array([token]), np.array([len(prompt) + place]))[0]
            rows.append(logits - np.log(np.exp(logits).sum()))
        search.advance(np.stack(rows))
    return search.best[0].tokens
