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
from deployments.generation.isolation import EngineTest, IsolatedStep, decode_isolated
from deployments.generation.job import Job
from deployments.generation.kv_slots import CacheMove, CopySlot, SlotTable
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
        self._encodes_source = decoder.info.max_source_tokens is not None
        self._slots = self._create_slots()
        self._prefill_rate = PrefillRate(INITIAL_PREFILL_TOKENS_PER_S)
        self._verify_cost = VerifyCost()
        self._prefills_oldest = True  # whether the next step starts with the oldest prompt
        self._engine_test = EngineTest(decoder, health)

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
        except EngineLost:
            raise
        except Exception as error:
            self._health.record_failure(error)
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
        done = cached = first_tokens = 0
        for job in pending:
            remaining = budget - done
            if done and (is_decode_idle or not self._fits(job, remaining, settings)):
                break
            max_tokens = min(remaining, settings.max_prefill_chunk_tokens)
            known = job.cached_tokens
            done += self._prefill_or_fail(job, max_tokens, settings)
            if job.number in self.active and self._has_last_chunk(job, budget - done):
                done += self._prefill_or_fail(job, budget - done, settings)
            cached += job.cached_tokens - known
            first_tokens += len(job.last_tokens)
            if not job.is_prefilled and job.number in self.active:
                break
        return PrefillOutput(done, cached, first_tokens)

    def _fits(self, job: Job, budget: int, settings: SchedulingSettings) -> bool:
        if self._encodes_source:
            return budget >= job.remaining_prompt_tokens
        return fits_min_chunk(job.remaining_prompt_tokens, budget, settings)

    def _prefill_or_fail(self, job: Job, max_tokens: int, settings: SchedulingSettings) -> int:
        """Prefill a chunk. Return the number of its tokens, or 0 if the prefill failed.

        A failed prefill affects only its own slot, so only this job ends. Raises EngineLost or
        _SlotsUnknown, which affect all slots.
        """
        try:
            with translate_panics():
                return self._prefill_chunk(job, max_tokens, settings)
        except (EngineLost, _SlotsUnknown):
            raise
        except Exception as error:  # noqa: BLE001  it is logged
            self._fail([(job, error)], is_decode=False)
            return 0

    def _prefill_chunk(self, job: Job, max_tokens: int, settings: SchedulingSettings) -> int:
        slot = self._slots.slot_of(job.slot_owners[0])
        if self._encodes_source:
            return self._encode_source(job, slot, settings)
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
        with self._prefill_rate.measuring(tokens, settings.min_prefill_chunk_tokens):
            logits = self._decoder.prefill(slot, ids, done, all_logits=with_logprobs)
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

    def _encode_source(self, job: Job, slot: int, settings: SchedulingSettings) -> int:
        """Encode the whole prompt. An encoder attends to all tokens, so do not chunk the prompt."""
        self._apply_moves(self._slots.start_prompt(slot, [], skip_prefix_cache=True)[1])
        with self._prefill_rate.measuring(len(job.prompt), settings.min_prefill_chunk_tokens):
            logits = self._decoder.prefill(slot, job.prompt, 0)
        self._slots.append_token(slot)  # the decoder start token
        job.accept_prompt_chunk(len(job.prompt), logits)
        self._start_answer(job, logits)
        return len(job.prompt)

    def _start_answer(self, job: Job, logits: Logits) -> None:
        started = job.build_started(self._decoder.info.compute_type)
        self.events.append(JobEvent(job.number, started))
        error = self._accept_logits(job, logits[None])
        if error is not None:
            raise error

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
            logits = self._decoder.verify(slot, ids, used_tokens)
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
            failure = self._accept_logits(job, logits[tokens][None])
            if failure is not None:
                self._fail([(job, failure)], is_decode=True)
                break
            tokens += 1
            is_match = job.last_tokens == [draft_token]
            accepted += is_match
            if not (job.number in self.active and is_match):
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
        failed: list[tuple[Job, Exception]] = []
        if step.error is not None:
            assert step.failed_slot is not None, "bug: an error without its slot"
            owner = self._slots.owner_of(step.failed_slot)
            job = next(job for job in self.active.values() if owner in job.slot_owners)
            failed.append((job, step.error))
        decoded = [(job, slots) for job, slots in job_slots if max(slots) < computed]
        for slot in chain.from_iterable(slots for _, slots in decoded):
            self._slots.append_token(slot)
        for job, slots in decoded:
            assert step.logits is not None, "bug: slots without logits"
            # For a single slot use a view instead of a copy, because a row of logits is large.
            rows = step.logits[slots[0]][None] if len(slots) == 1 else step.logits[slots]
            error = self._accept_logits(job, rows)
            if error is not None:
                failed.append((job, error))
        self._fail(failed, is_decode=True, jobs=len(decoded) + (step.error is not None))
        tokens = sum(len(slots) for _, slots in decoded)
        return StepOutput(tokens, tokens)

    def _decode_slots(self, ids: NDArray[np.int64]) -> IsolatedStep:
        """Decode a token per slot. If a slot makes the call fail, decode only the earlier slots.

        A recurrent decoder would read the tokens twice, so its failures are raised.
        """
        lengths = np.array([self._slots.used_tokens(slot) for slot in range(len(ids))])
        started_s = time.perf_counter()

        def decode(count: int) -> Logits:
            return self._decoder.decode(ids[:count], lengths[:count])

        if self._is_recurrent:
            try:
                return IsolatedStep(decode(len(ids)))
            except EngineLost:
                raise
            except Exception:
                self._test_engine(0, is_decode=True)  # all jobs end, so every slot may be changed
                raise
        step = decode_isolated(decode, len(ids))
        if len(ids) == 1 and step.error is None:
            self._verify_cost.update(int(lengths[0]), 1, time.perf_counter() - started_s)
        return step

    def _accept_logits(self, job: Job, logits: Logits) -> Exception | None:
        """Pass logits [sequences, V] to a job, and release it if it is done. Return its error."""
        is_decode = job.generated_tokens > 0
        try:
            with translate_panics():
                parents, chunk = job.accept_logits(logits)
        except Exception as error:  # noqa: BLE001  the caller ends the job
            return error
        self._engine_test.record_success(is_decode=is_decode)
        if chunk is not None:
            self.events.append(JobEvent(job.number, chunk))
        if chunk is not None and chunk.finished is not None:
            self.release(job)
        elif job.slot_count > 1:
            self._apply_moves(self._slots.fork(job.slot_owners, parents))
        return None

    def _fail(
        self, failed: Sequence[tuple[Job, Exception]], *, is_decode: bool, jobs: int = 1
    ) -> None:
        """End the jobs that failed in a call over `jobs` jobs. The others continue.

        If all of them failed, test the engine: the prompts of one client may be the cause, as with
        NaN logits, and must not quarantine the model.
        """
        suspects = [
            (job, error)
            for job, error in failed
            if isinstance(error, EngineFailed) or not isinstance(error, ServeError)
        ]
        for job, error in suspects:
            log.error("an answer to %d tokens failed", len(job.prompt), exc_info=error)
        if suspects and len(suspects) == jobs:
            owners = chain.from_iterable(job.slot_owners for job, _ in suspects)
            self._test_engine(min(map(self._slots.slot_of, owners)), is_decode=is_decode)
        for job, error in failed:
            self.events.append(JobEvent(job.number, hide_details(error)))
            self.release(job)

    def _test_engine(self, slot: int, *, is_decode: bool) -> None:
        """Test the engine in a slot whose contents no job needs any more."""
        self._slots.drop_prompt(slot)
        lengths = [self._slots.used_tokens(each) for each in range(slot)]
        self._engine_test.run(slot, lengths, is_decode=is_decode)

    def fail_all(self, error: ServeError) -> None:
        """End all active jobs after a failed step: the contents of their slots are unknown."""
        self.events += [JobEvent(number, error) for number in self.active]
        self.active.clear()
        self._slots = self._create_slots()
