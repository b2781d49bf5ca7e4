"""A generation loop over a fake decoder, and a reader of all that it tells."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deployments.config import SchedulingSettings
from deployments.errors import ServeError
from deployments.generation.job import Job, ModelContext, SamplingJob
from deployments.generation.messages import Chunk, GenerationOptions, Sampling, Started
from deployments.generation.scheduler import GenerationLoop
from deployments.generation.step_executor import JobEvent
from deployments.records import StepRecord
from tests.support.fake_decoder import VOCABULARY, FakeDecoder
from tests.support.fakes import TIMEOUT_S, ListRecorder, far_deadline

GREEDY = Sampling(temperature=0)
END = VOCABULARY - 1
SYSTEM = [n % (VOCABULARY - 1) for n in range(7, 37)]


def words(context: int) -> ModelContext:
    """A vocabulary of words, the last of which ends an answer."""
    names = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(names, unk_token="w0"))
    return ModelContext(tokenizer, VOCABULARY, (END,), frozenset((END,)), context)


class Reader:
    """Keeps what a loop publishes, by job."""

    def __init__(self) -> None:
        self.news: dict[int, list[Started | Chunk | ServeError]] = defaultdict(list)
        self._changed = threading.Condition()

    def publish(self, events: Sequence[JobEvent]) -> None:
        with self._changed:
            for job, what in events:
                self.news[job].append(what)
            self._changed.notify_all()

    def wait_until_done(self, *jobs: Job) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: all(map(self.is_done, jobs)), TIMEOUT_S)
        assert done, "a job was never finished"

    def wait_for_tokens(self, job: Job, count: int) -> None:
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.tokens(job)) >= count, TIMEOUT_S)
        assert enough, "the tokens never came"

    def is_done(self, job: Job) -> bool:
        last = next(reversed(self.news[job.number]), None)
        return isinstance(last, ServeError) or (isinstance(last, Chunk) and bool(last.finished))

    def tokens(self, job: Job) -> list[int]:
        chunks = [what for what in self.news[job.number] if isinstance(what, Chunk)]
        return [token.id for chunk in chunks for token in chunk.tokens]

    def started(self, job: Job) -> Started:
        (started,) = (what for what in self.news[job.number] if isinstance(what, Started))
        return started


class LoopHarness:
    """A loop over a fake decoder, and a reader of all it tells."""

    def __init__(self, decoder: FakeDecoder, rules: SchedulingSettings) -> None:
        self.decoder = decoder
        self.reader = Reader()
        self.steps: ListRecorder[StepRecord] = ListRecorder()
        self.loop = GenerationLoop(decoder, rules, self.reader.publish, self.steps, "tiny/writer")
        self._words = words(decoder.context)

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
        return SamplingJob(prompt, options, self._words, constraint, deadline_s or far_deadline())

    def answered(self, *jobs: Job) -> list[list[int]]:
        for job in jobs:
            self.loop.submit(job)
        self.reader.wait_until_done(*jobs)
        return [self.reader.tokens(job) for job in jobs]
