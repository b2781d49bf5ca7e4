"""What happens in one step to the jobs of a decoder: rows taken, prompts read, tokens written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from deployments.config import SchedulingSettings
from deployments.engines.decoder import DecoderEngine, Logits
from deployments.errors import EngineLost, ServeError
from deployments.generation.job import Job
from deployments.generation.messages import Chunk, Started
from deployments.generation.prompt_lookup import PromptLookupDrafter, VerifyCost
from deployments.generation.slots import (
    CacheMove,
    CopySlot,
    PrefillRate,
    RowTable,
    chunk_size,
    fits_min_chunk,
    prefill_budget,
)

log = logging.getLogger("ray.serve.hundredfold")

# Until a part was measured. Low, so that the first prompts are read in small parts.
FIRST_TOKENS_PER_S = 200.0
# Of jobs that tell their prompts' tokens: the logits behind each are kept for a moment.
MAX_LOGPROB_CHUNK_TOKENS = 64


class JobEvent(NamedTuple):
    """What happened to a job."""

    job: int  # its number
    what: Started | Chunk | ServeError  # an error, or a chunk that is finished, is the last


class StepOutput(NamedTuple):
    """What a step has written."""

    tokens: int
    drafted: int = 0  # guessed, for one answer
    accepted: int = 0  # of them, those that were right


NO_OUTPUT = StepOutput(0)

# The next in line, if so many rows are enough for it.
NextJob = Callable[[int], Job | None]


class StepExecutor:
    """The active jobs and their rows. One thread at a time; what happens goes to `events`."""

    def __init__(self, decoder: DecoderEngine, next_job: NextJob) -> None:
        self.active: dict[int, Job] = {}  # by number, first come first
        self.events: list[JobEvent] = []
        self.failures = 0  # calls of the decoder that failed, since one did not
        self._decoder = decoder
        self._next_job = next_job
        self._rows = RowTable(decoder.info.slots)
        self._speed = PrefillRate(FIRST_TOKENS_PER_S)
        self._token_cost = VerifyCost()

    def admit(self) -> None:
        """Give rows to those who are next, as long as there are any."""
        while job := self._next_job(self._rows.free):
            for slot_owner in job.slot_owners:
                self._rows.take(slot_owner)
            self._enter(job)

    def _enter(self, job: Job) -> None:
        job.clock.started_s = time.perf_counter()
        self.active[job.number] = job

    def leave(self, job: Job) -> None:
        """Free the job's row, for the next in line if there is one: then nothing has to move."""
        del self.active[job.number]
        for slot_owner in job.slot_owners:
            successor = self._next_job(1)
            if successor is None:
                self._apply_moves(self._rows.give_up(slot_owner))
            else:
                self._rows.hand_over(slot_owner, *successor.slot_owners)
                self._enter(successor)

    def _apply_moves(self, moves: Sequence[CacheMove]) -> None:
        for move in moves:
            if isinstance(move, CopySlot):
                self._decoder.copy(move.source, move.target, move.tokens)
            else:
                self._decoder.swap(move.first, move.second, move.tokens)

    def read_prompts(self, rules: SchedulingSettings) -> int:
        """Compute parts of prompts, first come, first served; how many tokens."""
        unread = [job for job in self.active.values() if not job.is_prefilled]
        is_decode_idle = len(unread) == len(self.active)
        budget = prefill_budget(self._speed.tokens_per_s, rules, is_decode_idle=is_decode_idle)
        read = 0
        for job in unread:
            left = budget - read
            if read and (is_decode_idle or not fits_min_chunk(job.unread, left, rules)):
                break
            read += self._prefill_or_fail(job, min(left, rules.max_prefill_chunk_tokens), rules)
            if not job.is_prefilled and job.number in self.active:
                break
        return read

    def _prefill_or_fail(self, job: Job, most: int, rules: SchedulingSettings) -> int:
        """Compute about `most` tokens of a prompt; how many it were, 0 where that is its end.

        What was read of it is nobody else's: a prompt that cannot be computed ends alone.
        """
        try:
            return self._prefill_chunk(job, most, rules)
        except EngineLost:
            raise
        except ServeError as error:
            log.error("a prompt of %d tokens could not be computed: %s", len(job.prompt), error)
            self._end(job, error)
            return 0

    def _prefill_chunk(self, job: Job, most: int, rules: SchedulingSettings) -> int:
        """Compute about `most` tokens of a prompt; how many it were."""
        row = self._rows.row_of(job.slot_owners[0])
        if self._decoder.info.max_source_tokens is not None:
            return self._encode_source(job, row)
        if job.unread == len(job.prompt):
            shared, moves = self._rows.begin(
                row, job.prompt, skip_prefix_cache=job.needs_prompt_logprobs
            )
            self._apply_moves(moves)
            job.cached, job.unread = shared, job.unread - shared
        tokens = chunk_size(
            job.unread, min(most, MAX_LOGPROB_CHUNK_TOKENS) if job.needs_prompt_logprobs else most
        )
        done = len(job.prompt) - job.unread
        ids = job.prompt[done : done + tokens]
        began_s = time.perf_counter()
        logits = self._call_engine(
            lambda: self._decoder.prefill(row, ids, done, all_logits=job.needs_prompt_logprobs)
        )
        self._speed.learn(tokens, time.perf_counter() - began_s, rules.min_prefill_chunk_tokens)
        self._rows.read(row, ids)
        job.read(tokens, logits)
        if job.is_prefilled:
            self._begin_answer(job, logits[-1] if job.needs_prompt_logprobs else logits)
        return tokens

    def _encode_source(self, job: Job, row: int) -> int:
        """Let the encoder read a prompt, whole: nothing before it can be known in parts."""
        self._apply_moves(self._rows.begin(row, [], skip_prefix_cache=True)[1])
        logits = self._call_engine(lambda: self._decoder.prefill(row, job.prompt, 0))
        self._rows.wrote(row)  # the token that answers begin after
        job.read(len(job.prompt), logits)
        self._begin_answer(job, logits)
        return len(job.prompt)

    def _begin_answer(self, job: Job, logits: Logits) -> None:
        self.events.append(JobEvent(job.number, job.started(self._decoder.info.compute_type)))
        self._write(job, logits[None])

    def write_tokens(self, rules: SchedulingSettings) -> StepOutput:
        """One more token for everybody whose prompt is read, or several for one who is alone."""
        writing = [job for job in self.active.values() if job.is_prefilled]
        if (
            len(writing) == 1
            and (drafter := writing[0].drafter)
            and (draft := self._draft(writing[0], drafter, rules))
        ):
            return self._verify(writing[0], drafter, draft)
        return self._decode(writing)

    def _draft(
        self, job: Job, drafter: PromptLookupDrafter, rules: SchedulingSettings
    ) -> Sequence[int]:
        """What may come next, as far as it is worth a look."""
        filled = self._rows.filled(self._rows.row_of(job.slot_owners[0]))
        most = min(rules.max_draft_tokens, self._decoder.info.max_draft_tokens)
        return drafter.draft(most, self._token_cost.share(filled))

    def _verify(self, job: Job, drafter: PromptLookupDrafter, draft: Sequence[int]) -> StepOutput:
        """Read a draft behind the last token; the job goes on as long as it is what follows."""
        row = self._rows.row_of(job.slot_owners[0])
        ids, filled = [*job.last_tokens, *draft], self._rows.filled(row)
        began_s = time.perf_counter()
        logits = self._call_engine(lambda: self._decoder.verify(row, ids, filled))
        self._token_cost.learn(filled, len(ids), time.perf_counter() - began_s)
        written = accepted = 0
        for guessed in (*draft, None):
            self._rows.wrote(row)
            goes_on = self._write(job, logits[written][None])
            written += 1
            is_right = job.last_tokens == [guessed]
            accepted += is_right
            if not (goes_on and is_right):
                break
        drafter.learn(len(draft), accepted)
        return StepOutput(written, len(draft), accepted)

    def _decode(self, writing: Sequence[Job]) -> StepOutput:
        """One more token behind each beginning of the jobs."""
        rows_of = [
            [
                self._rows.row_of(slot_owner)
                for slot_owner in job.slot_owners[: len(job.last_tokens)]
            ]
            for job in writing
        ]
        if not rows_of:
            return NO_OUTPUT
        ids = np.zeros(1 + max(map(max, rows_of)), np.int64)
        for job, rows in zip(writing, rows_of, strict=True):
            ids[rows] = job.last_tokens
        lengths = np.array([self._rows.filled(row) for row in range(len(ids))])
        began_s = time.perf_counter()
        logits = self._call_engine(lambda: self._decoder.decode(ids, lengths))
        if len(ids) == 1:
            self._token_cost.learn(int(lengths[0]), 1, time.perf_counter() - began_s)
        for row in chain.from_iterable(rows_of):
            self._rows.wrote(row)
        for job, rows in zip(writing, rows_of, strict=True):
            # A view, where it is one: rows of logits are long.
            self._write(job, logits[rows[0]][None] if len(rows) == 1 else logits[rows])
        return StepOutput(sum(map(len, rows_of)))

    def _write(self, job: Job, logits: Logits) -> bool:
        """Give a job the logits behind each of its beginnings, [beginnings, V]: does it go on?"""
        try:
            parents, chunk = job.write(logits)
        except ServeError as error:
            self._end(job, error)
            return False
        if chunk is not None:
            self.events.append(JobEvent(job.number, chunk))
        if chunk is not None and chunk.finished is not None:
            self.leave(job)
            return False
        if job.width > 1:
            self._apply_moves(self._rows.branch(job.slot_owners, parents))
        return True

    def _end(self, job: Job, error: ServeError) -> None:
        """A job that cannot go on; nobody else is concerned."""
        self.events.append(JobEvent(job.number, error))
        self.leave(job)

    def _call_engine(self, call: Callable[[], Logits]) -> Logits:
        """What a call of the decoder answers, and a note of whether it did."""
        self.failures += 1
        logits = call()
        self.failures = 0
        return logits

    def fail_all(self, error: ServeError) -> None:
        """The engine gave up: nobody's memory can be trusted."""
        self.events += [JobEvent(number, error) for number in self.active]
        self.active.clear()
        self._rows = RowTable(self._decoder.info.slots)
