"""One step of a decoder: admission to KV slots, chunked prefill, decode step or verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from deployments.config import SchedulingSettings
from deployments.engines.decoder import DecoderEngine, Logits
from deployments.errors import EngineFailed, EngineLost, ServeError, hide_details
from deployments.generation.isolation import IsolatedStep, decode_isolated
from deployments.generation.job import Job
from deployments.generation.kv_slots import CacheMove, CopySlot, Owner, SlotTable
from deployments.generation.prefill import (
    MAX_LAST_CHUNK_TOKENS,
    PrefillRate,
    chunk_size,
    extend_first_chunk,
    fits_min_chunk,
    prefill_budget,
    resumable_chunk_size,
)
from deployments.generation.prompt_lookup import PromptLookupDrafter, VerifyCost
from deployments.generation.step_results import NO_OUTPUT, JobEvent, PrefillOutput, StepOutput
from deployments.health import WorkerHealth
from deployments.tokenization.encodings import translate_panics

log = logging.getLogger("ray.serve.hundredfold")

# Rate assumed before the first measurement. It is low so that the first chunk has 32 tokens
# (see prefill_budget): even a machine that computes 4 tokens per second needs less than
# HANG_TIMEOUT_S (health.py) for this chunk.
INITIAL_PREFILL_TOKENS_PER_S = 16.0
# With `prompt_logprobs` a chunk has logits [tokens, V]. This limit bounds their memory, so it also
# overrides a larger `min_prefill_chunk_tokens`.
MAX_LOGPROB_CHUNK_TOKENS = 64


class _SlotsUnknown(EngineFailed):
    """A slot could not be copied or swapped, so the contents of several slots are unknown."""


# Dequeues the next job if it fits the given number of free slots.
NextJob = Callable[[int], Job | None]


class StepExecutor:
    """The active jobs and their KV slots. Not thread-safe. The caller publishes `events`."""

    def __init__(self, decoder: DecoderEngine, next_job: NextJob, health: WorkerHealth) -> None:
        self.active: dict[int, Job] = {}  # by `Job.number`, in order of admission
        self.events: list[JobEvent] = []
        self._health = health
        self._decoder = decoder
        self._next_job = next_job
        self._is_recurrent = decoder.info.is_recurrent
        self._slots = self._create_slots()
        self._prefill_rate = PrefillRate(INITIAL_PREFILL_TOKENS_PER_S)
        self._verify_cost = VerifyCost()
        self._prefills_oldest = True  # whether the next step starts with the oldest prompt
        # Whether the last failure was in a decode step and no decode step has succeeded since.
        self._decode_fails = False

    def _create_slots(self) -> SlotTable:
        info = self._decoder.info
        return SlotTable(info.slots, is_recurrent=info.is_recurrent, min_prefix=info.min_chunk_end)

    @property
    def used_slots(self) -> int:
        return self._slots.used_slots

    def admit(self) -> None:
        """Activate waiting jobs while there are free slots."""
        while job := self._next_job(self._slots.free_slots):
            for owner in job.slot_owners:
                self._slots.acquire(owner)
            self._activate(job)

    def _activate(self, job: Job) -> None:
        job.times.started_s = time.perf_counter()
        self.active[job.number] = job

    def release(self, job: Job) -> None:
        """Free the slots of a job.

        A waiting job that needs one slot takes the slot over directly, so that no other slot has to
        move into the gap.
        """
        del self.active[job.number]
        for owner in job.slot_owners:
            successor = self._next_job(1)
            if successor is None:
                self._apply_moves(self._slots.release(owner))
            else:
                self._slots.transfer(owner, *successor.slot_owners)
                self._activate(successor)

    def _apply_moves(self, moves: Sequence[CacheMove]) -> None:
        try:
            for move in moves:
                if isinstance(move, CopySlot):
                    self._decoder.copy(move.source, move.target, move.tokens)
                else:
                    self._decoder.swap(move.first, move.second, move.tokens)
        except Exception as error:
            self._health.record_failure(error)
            if isinstance(error, EngineLost):
                raise
            raise _SlotsUnknown("a KV slot could not be moved") from error

    def prefill(self, settings: SchedulingSettings) -> PrefillOutput:
        """Prefill chunks of prompts.

        Every other step starts with the oldest prompt, the steps between with the shortest. A short
        prompt therefore does not wait for all long prompts, and short prompts do not starve a long
        prompt.
        """
        pending = [job for job in self.active.values() if not job.is_prefilled]
        oldest = pending[:1] if self._prefills_oldest else []
        self._prefills_oldest = not self._prefills_oldest
        pending.sort(key=lambda job: (job not in oldest, job.remaining_prompt_tokens))
        is_decode_idle = len(pending) == len(self.active)
        budget = prefill_budget(
            self._prefill_rate.tokens_per_s, settings, is_decode_idle=is_decode_idle
        )
        done = cached = 0
        for job in pending:
            remaining = budget - done
            if done and (
                is_decode_idle
                or not fits_min_chunk(job.remaining_prompt_tokens, remaining, settings)
            ):
                break
            max_tokens = min(remaining, settings.max_prefill_chunk_tokens)
            known = job.cached_tokens
            done += self._prefill_or_fail(job, max_tokens, settings)
            if job.number in self.active and self._has_last_chunk(job, budget - done):
                done += self._prefill_or_fail(job, budget - done, settings)
            cached += job.cached_tokens - known
            if not job.is_prefilled and job.number in self.active:
                break
        return PrefillOutput(done, cached)

    def _prefill_or_fail(self, job: Job, max_tokens: int, settings: SchedulingSettings) -> int:
        """Prefill a chunk. Return the number of its tokens, or 0 if the prefill failed.

        A failed prefill affects only its own slot, so only this job ends. Raises EngineLost or
        _SlotsUnknown, which affect all slots.
        """
        try:
            return self._prefill_chunk(job, max_tokens, settings)
        except (EngineLost, _SlotsUnknown):
            raise
        except Exception as error:
            log.error("prefill of a prompt of %d tokens failed", len(job.prompt), exc_info=error)
            if self._is_recurrent:  # the states may include a part of the chunk
                self._slots.drop_prompt(self._slots.slot_of(job.slot_owners[0]))
            self._fail(job, hide_details(error))
            return 0

    def _prefill_chunk(self, job: Job, max_tokens: int, settings: SchedulingSettings) -> int:
        slot = self._slots.slot_of(job.slot_owners[0])
        if self._decoder.info.max_source_tokens is not None:
            return self._encode_source(job, slot)
        with_logprobs = job.needs_prompt_logprobs
        if job.remaining_prompt_tokens == len(job.prompt):
            cached, moves = self._slots.start_prompt(
                slot, job.prompt, job.prefix_cache_scope, skip_prefix_cache=with_logprobs
            )
            self._apply_moves(moves)
            job.cached_tokens = cached
            job.remaining_prompt_tokens -= cached
        if with_logprobs:
            max_tokens = min(max_tokens, MAX_LOGPROB_CHUNK_TOKENS)
        done = len(job.prompt) - job.remaining_prompt_tokens
        tokens = extend_first_chunk(
            self._chunk_size(job, slot, max_tokens),
            done,
            job.remaining_prompt_tokens,
            self._decoder.info.min_chunk_end,
        )
        ids = job.prompt[done : done + tokens]
        started_s = time.perf_counter()
        logits = self._call_engine(
            lambda: self._decoder.prefill(slot, ids, done, all_logits=with_logprobs),
            is_decode=False,
        )
        elapsed_s = time.perf_counter() - started_s
        self._prefill_rate.update(tokens, elapsed_s, settings.min_prefill_chunk_tokens)
        self._slots.append_prompt(slot, ids)
        self._apply_moves(self._slots.store_shared_prefix(slot))
        job.accept_prompt_chunk(tokens, logits)
        if job.is_prefilled:
            self._start_answer(job, logits[-1] if with_logprobs else logits)
        return tokens

    def _chunk_size(self, job: Job, slot: int, max_tokens: int) -> int:
        if not self._is_recurrent:
            return chunk_size(job.remaining_prompt_tokens, max_tokens)
        if shared := self._slots.shared_tokens_left(slot):
            return chunk_size(shared, max_tokens)
        return resumable_chunk_size(job.remaining_prompt_tokens, max_tokens)

    def _has_last_chunk(self, job: Job, budget: int) -> bool:
        """Return whether only the short last chunk is left, which `budget` covers."""
        rest = job.remaining_prompt_tokens
        return self._is_recurrent and 0 < rest <= min(budget, MAX_LAST_CHUNK_TOKENS)

    def _encode_source(self, job: Job, slot: int) -> int:
        """Encode the whole prompt. An encoder attends to all tokens, so do not chunk the prompt."""
        self._apply_moves(self._slots.start_prompt(slot, [], skip_prefix_cache=True)[1])
        logits = self._call_engine(
            lambda: self._decoder.prefill(slot, job.prompt, 0), is_decode=False
        )
        self._slots.append_token(slot)  # the decoder start token
        job.accept_prompt_chunk(len(job.prompt), logits)
        self._start_answer(job, logits)
        return len(job.prompt)

    def _start_answer(self, job: Job, logits: Logits) -> None:
        started = job.build_started(self._decoder.info.compute_type)
        self.events.append(JobEvent(job.number, started))
        self._accept_logits(job, logits[None])

    def decode(self, settings: SchedulingSettings) -> StepOutput:
        """Generate a token for each prefilled job, or verify draft tokens of a single job."""
        jobs = [job for job in self.active.values() if job.is_prefilled]
        if (
            len(jobs) == 1
            and (drafter := jobs[0].drafter)
            and (draft := self._draft(jobs[0], drafter, settings))
        ):
            return self._verify(jobs[0], drafter, draft)
        return self._decode_step(jobs)

    def _draft(
        self, job: Job, drafter: PromptLookupDrafter, settings: SchedulingSettings
    ) -> Sequence[int]:
        used_tokens = self._slots.used_tokens(self._slots.slot_of(job.slot_owners[0]))
        max_tokens = min(settings.max_draft_tokens, self._decoder.info.max_draft_tokens)
        return drafter.draft(max_tokens, self._verify_cost.token_share(used_tokens))

    def _verify(self, job: Job, drafter: PromptLookupDrafter, draft: Sequence[int]) -> StepOutput:
        """Run the last token and the draft in one call. Accept draft tokens until one is wrong.

        A draft token is right if the job chooses the same token. The call yields one more token
        after the accepted ones. If the call fails, run a decode step.
        """
        slot = self._slots.slot_of(job.slot_owners[0])
        ids, used_tokens = [*job.last_tokens, *draft], self._slots.used_tokens(slot)
        started_s = time.perf_counter()
        try:
            logits = self._call_engine(lambda: self._decoder.verify(slot, ids, used_tokens))
        except EngineLost:
            raise
        except Exception as error:
            log.error("a verification failed; trying a decode step", exc_info=error)
            drafter.update(len(draft), 0)
            return self._decode_step([job])
        self._verify_cost.update(used_tokens, len(ids), time.perf_counter() - started_s)
        tokens = accepted = 0
        for draft_token in (*draft, None):
            self._slots.append_token(slot)
            continues = self._accept_logits(job, logits[tokens][None])
            tokens += 1
            is_match = job.last_tokens == [draft_token]
            accepted += is_match
            if not (continues and is_match):
                break
        drafter.update(len(draft), accepted)
        return StepOutput(tokens, 1, len(draft), accepted)

    def _decode_step(self, jobs: Sequence[Job]) -> StepOutput:
        """Generate one token for each sequence of the jobs, in one call.

        If one slot makes the call fail, the job of this slot ends. The jobs in later slots wait for
        the next step.
        """
        if jobs and self._is_recurrent:
            pending = (job for job in self.active.values() if not job.is_prefilled)
            owners = [owner for job in pending for owner in job.slot_owners]
            self._apply_moves(self._slots.move_last(owners))
        job_slots = [
            (job, [self._slots.slot_of(owner) for owner in job.slot_owners[: len(job.last_tokens)]])
            for job in jobs
        ]
        if not job_slots:
            return NO_OUTPUT
        # Slots of jobs that are not prefilled may lie in between, unless the decoder is recurrent.
        # They decode token 0, and their results are ignored.
        ids = np.zeros(1 + max(max(slots) for _, slots in job_slots), np.int64)
        for job, slots in job_slots:
            ids[slots] = job.last_tokens
        step = self._decode_slots(ids)
        computed = 0 if step.logits is None else len(step.logits)
        failed = None if step.failed_slot is None else self._slots.owner_of(step.failed_slot)
        decoded = [(job, slots) for job, slots in job_slots if max(slots) < computed]
        for slot in chain.from_iterable(slots for _, slots in decoded):
            self._slots.append_token(slot)
        for job, slots in decoded:
            assert step.logits is not None, "bug: slots without logits"
            # For a single slot use a view instead of a copy, because a row of logits is large.
            rows = step.logits[slots[0]][None] if len(slots) == 1 else step.logits[slots]
            self._accept_logits(job, rows)
        if step.error is not None:
            self._fail_owner(failed, step.error)
        tokens = sum(len(slots) for _, slots in decoded)
        return StepOutput(tokens, tokens)

    def _decode_slots(self, ids: NDArray[np.int64]) -> IsolatedStep:
        """Decode a token per slot. If a slot makes the call fail, decode only the earlier slots.

        A recurrent decoder would read the tokens twice, so its failures are raised.
        """
        lengths = np.array([self._slots.used_tokens(slot) for slot in range(len(ids))])
        started_s = time.perf_counter()

        def decode(count: int) -> Logits:
            return self._call_engine(lambda: self._decoder.decode(ids[:count], lengths[:count]))

        if self._is_recurrent:
            return IsolatedStep(decode(len(ids)))
        step = decode_isolated(decode, len(ids))
        if len(ids) == 1 and step.error is None:
            self._verify_cost.update(int(lengths[0]), 1, time.perf_counter() - started_s)
        return step

    def _fail_owner(self, owner: Owner, error: Exception) -> None:
        """End the job with this slot owner. The other jobs continue."""
        job = next(job for job in self.active.values() if owner in job.slot_owners)
        log.error("decode steps fail with one of %d jobs", len(self.active), exc_info=error)
        self._fail(job, hide_details(error))

    def _accept_logits(self, job: Job, logits: Logits) -> bool:
        """Pass logits [sequences, V] to a job. Return whether the job continues."""
        is_decode = job.generated_tokens > 0
        try:
            with translate_panics():
                parents, chunk = job.accept_logits(logits)
        except Exception as error:
            if isinstance(error, EngineFailed):  # non-finite logits, or a panic in Rust
                self._record_failure(error, is_decode=is_decode)
            elif not isinstance(error, ServeError):
                log.error("bug: an answer failed", exc_info=error)
            self._fail(job, hide_details(error))
            return False
        # A prefill that succeeds must not hide decode steps that fail.
        if is_decode or not self._decode_fails:
            self._decode_fails = False
            self._health.record_success()
        if chunk is not None:
            self.events.append(JobEvent(job.number, chunk))
        if chunk is not None and chunk.finished is not None:
            self.release(job)
            return False
        if job.slot_count > 1:
            self._apply_moves(self._slots.fork(job.slot_owners, parents))
        return True

    def _fail(self, job: Job, error: ServeError) -> None:
        """End one job with an error; the other jobs continue."""
        self.events.append(JobEvent(job.number, error))
        self.release(job)

    def _call_engine(self, call: Callable[[], Logits], *, is_decode: bool = True) -> Logits:
        """Return the logits of a call. Record a failure; `_accept_logits` records a success."""
        try:
            return call()
        except Exception as error:
            self._record_failure(error, is_decode=is_decode)
            raise

    def _record_failure(self, error: Exception, *, is_decode: bool) -> None:
        self._decode_fails = is_decode
        self._health.record_failure(error)

    def fail_all(self, error: ServeError) -> None:
        """End all active jobs after a failed step: the contents of their slots are unknown."""
        self.events += [JobEvent(number, error) for number in self.active]
        self.active.clear()
        self._slots = self._create_slots()
