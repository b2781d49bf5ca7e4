from __future__ import annotations

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    ModelUnavailable,
    Overloaded,
)
from deployments.generation.beam_search import BeamSearch, BeamSearchJob
from deployments.generation.job import Job
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import (
    BeamSearchParams,
    Chunk,
    FinishReason,
    GenerationOptions,
    SamplingParams,
)
from tests.support.fake_decoder import FakeDecoder
from tests.support.fakes import TIMEOUT_S, far_deadline
from tests.support.loop_harness import END, GREEDY, SYSTEM, build_model_context


def test_stream_has_started_chunks_and_finish_reason(make_harness) -> None:
    harness = make_harness()
    job = harness.job([1, 2, 3], new_tokens=4)
    (tokens,) = harness.run_jobs(job)
    started = harness.collector.started(job)
    assert (started.prompt_tokens, started.cached_tokens) == (3, 0)
    assert started.compute_type == "cpu-fake"
    last = harness.collector.events[job.number][-1]
    assert isinstance(last, Chunk)
    assert last.finished is not None
    if last.finished.reason is FinishReason.LENGTH:
        assert len(tokens) == last.finished.generated_tokens == 4
    else:
        assert tokens[-1] == END


def test_answer_is_limited_by_the_context(make_harness) -> None:
    harness = make_harness(FakeDecoder(context=20))
    never_end = GenerationOptions(sampling=GREEDY, min_new_tokens=10_000)
    (tokens,) = harness.run_jobs(harness.job(range(15), options=never_end))
    assert len(tokens) == 5


@pytest.mark.parametrize("seed", range(8))
def test_answer_is_independent_of_other_jobs(make_harness, seed: int) -> None:
    """Random prompts with shared prefixes, lengths and cancellations on four slots."""
    chance = random.Random(seed)
    prompts = [
        [
            *(SYSTEM if chance.random() < 0.5 else []),
            *chance.choices(range(60), k=chance.randint(1, 30)),
        ]
        for _ in range(24)
    ]
    sampled = [
        SamplingParams(temperature=chance.choice([0, 1.0]), top_p=0.9, seed=number)
        for number in range(len(prompts))
    ]
    orders = [
        GenerationOptions(sampling=sampling, max_new_tokens=chance.randint(1, 25))
        for sampling in sampled
    ]
    alone = []
    for prompt, options in zip(prompts, orders, strict=True):
        harness = make_harness()
        alone += harness.run_jobs(harness.job(prompt, options=options))
    crowd = make_harness()
    jobs = [crowd.job(p, options=o) for p, o in zip(prompts, orders, strict=True)]
    dropped = set(chance.sample(range(len(jobs)), 6))
    for number, job in enumerate(jobs):
        crowd.loop.submit(job)
        if number in dropped:
            threading.Timer(chance.random() * 0.02, crowd.loop.cancel, (job,)).start()
    remaining = [number for number in range(len(jobs)) if number not in dropped]
    crowd.collector.wait_until_done(*(jobs[number] for number in remaining))
    for number in remaining:
        assert crowd.collector.tokens(jobs[number]) == alone[number], f"prompt {number}"
    assert crowd.decoder.moved > 0, "nothing was shared or moved: the test shows nothing"


def test_shared_prefix_is_prefilled_once(make_harness) -> None:
    harness = make_harness()
    jobs = [harness.job([*SYSTEM, n, n + 1, n + 2]) for n in range(3)]
    harness.run_jobs(*jobs)
    assert [harness.collector.started(job).cached_tokens for job in jobs] == [0, 30, 30]
    assert sum(tokens for _, tokens in harness.decoder.parts) == 33 + 3 + 3


def test_prompt_logprobs_skip_the_prefix_cache(make_harness) -> None:
    harness = make_harness()
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=2, prompt_logprobs=True)
    first, second = harness.job(SYSTEM, 2), harness.job(SYSTEM, options=options)
    harness.run_jobs(first, second)
    started = harness.collector.started(second)
    assert started.cached_tokens == 0
    assert [token.id for token in started.prompt] == SYSTEM
    assert started.prompt[0].logprob is None
    assert all(token.logprob is not None and token.logprob < 0 for token in started.prompt[1:])


def test_waiting_jobs_run_in_order(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1))
    jobs = [harness.job([n, n + 1, n + 2]) for n in range(5)]
    harness.run_jobs(*jobs)
    assert [job.number for job in jobs] == list(harness.collector.events)


def found_beams(prompt: list[int], beams: int, most: int) -> tuple[int, ...]:
    """Find the best beams without a KV cache."""
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


@pytest.mark.parametrize("beams", [2, 3])
def test_beam_search_runs_next_to_other_jobs(make_harness, beams: int) -> None:
    harness = make_harness()
    prompts = [[*SYSTEM, n, 5] for n in range(6)]
    alone = [found_beams(prompt, beams, 9) for prompt in prompts]
    options = GenerationOptions(beam_search=BeamSearchParams(beams), max_new_tokens=9)
    jobs: list[Job] = []
    for prompt in prompts:
        jobs.append(
            BeamSearchJob(
                prompt, options, BeamSearchParams(beams), build_model_context(96), far_deadline()
            )
        )
        jobs.append(harness.job(prompt, new_tokens=15))
    answers = harness.run_jobs(*jobs)
    assert [tuple(tokens) for tokens in answers[::2]] == alone
    (expected,) = (fresh := make_harness()).run_jobs(fresh.job(prompts[0], new_tokens=15))
    assert answers[1] == expected


def test_beam_search_job_waits_for_all_its_slots_in_order(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=3, held=threading.Event()))
    options = GenerationOptions(beam_search=BeamSearchParams(3), max_new_tokens=4)
    first = harness.job([1, 2], new_tokens=4)
    wide = BeamSearchJob(
        [3, 4], options, BeamSearchParams(3), build_model_context(96), far_deadline()
    )
    last = harness.job([5, 6], new_tokens=4)
    for job in (first, wide, last):
        harness.loop.submit(job)
    harness.decoder.held.set()
    harness.collector.wait_until_done(first, wide, last)
    assert list(harness.collector.events) == [first.number, wide.number, last.number]


def test_full_queue_rejects_at_once(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, held=threading.Event()), max_waiting_requests=2)
    first = harness.job([1, 2])
    harness.loop.submit(first)
    deadline_s = time.monotonic() + TIMEOUT_S
    while harness.loop.load != (1, 0):
        assert time.monotonic() < deadline_s
    others = [harness.job([3, 4]), harness.job([5, 6])]
    for job in others:
        harness.loop.submit(job)
    with pytest.raises(Overloaded):
        harness.loop.submit(harness.job([7, 8]))
    harness.decoder.held.set()
    harness.collector.wait_until_done(first, *others)


def test_cancelled_job_frees_its_slot_within_a_step(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, context=4096))
    never_end = GenerationOptions(sampling=GREEDY, min_new_tokens=4000, max_new_tokens=4000)
    endless = harness.job([1, 2], options=never_end)
    harness.loop.submit(endless)
    harness.collector.wait_for_tokens(endless, 3)
    harness.loop.cancel(endless)
    decodes = len(harness.decoder.decodes)
    next_one = harness.job([3, 4], new_tokens=2)
    harness.run_jobs(next_one)
    assert len(harness.collector.tokens(endless)) < 4000
    assert len(harness.decoder.decodes) - decodes <= 4
    assert not harness.collector.is_done(endless)


def test_waiting_job_can_be_cancelled(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, held=threading.Event()))
    first, second, third = (harness.job([n, n + 1]) for n in range(3))
    for job in (first, second, third):
        harness.loop.submit(job)
    harness.loop.cancel(second)
    harness.decoder.held.set()
    harness.collector.wait_until_done(first, third)
    assert second.number not in harness.collector.events


def test_expired_jobs_end(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, context=4096))
    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=4000)
    running = harness.job([1, 2], options=endless, deadline_s=time.monotonic() + 0.2)
    waiting = harness.job([3, 4], deadline_s=time.monotonic() + 0.1)
    harness.run_jobs(running, waiting)
    assert isinstance(harness.collector.events[running.number][-1], DeadlineExceeded)
    # Overloaded as soon as the deadline cannot be kept.
    last = harness.collector.events[waiting.number][-1]
    assert isinstance(last, (DeadlineExceeded, Overloaded))


def test_step_that_fails_once_changes_no_answer(make_harness) -> None:
    jobs = [([n, n + 1, 5], 20) for n in range(3)]
    sound, harness = make_harness(), make_harness(FakeDecoder(failing_decode=2))
    answers = [
        each.run_jobs(*(each.job(prompt, new_tokens=tokens) for prompt, tokens in jobs))
        for each in (sound, harness)
    ]
    assert answers[0] == answers[1]
    assert harness.decoder.failing_decode == -1, "no step failed: the test shows nothing"


class PoisonedDecoder(FakeDecoder):
    """Decode steps fail while a slot in use has one of the `poisons` among its tokens."""

    def __init__(self, poisons: tuple[int, ...], **how: int) -> None:
        super().__init__(**how)
        self._poisons = poisons
        self.failures = 0

    def decode(self, ids, lengths):
        for slot, length in enumerate(lengths):
            if np.isin(self.memory[slot, :length, 0], self._poisons).any():
                self.failures += 1
                raise EngineFailed("a token that no kernel computes")
        return super().decode(ids, lengths)


@pytest.mark.parametrize("poisoned", [(0,), (2,), (5,), (1, 4)])
def test_failing_step_ends_only_the_jobs_that_cause_it(make_harness, poisoned) -> None:
    """Poisons are tokens of prompts that no answer contains."""
    options = GenerationOptions(
        sampling=SamplingParams(temperature=0, logit_bias=((50, -100.0),)),
        min_new_tokens=12,
        max_new_tokens=12,
    )
    prompts = [[50 if n in poisoned else 49, n + 1, 5] for n in range(6)]
    alone = []
    for prompt in prompts:
        fresh = make_harness()
        alone += fresh.run_jobs(fresh.job(prompt, options=options))
    harness = make_harness(PoisonedDecoder((50,), slots=6))
    jobs = [harness.job(prompt, options=options) for prompt in prompts]
    answers = harness.run_jobs(*jobs)
    assert harness.decoder.failures
    for number, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
        if number in poisoned:
            assert isinstance(harness.collector.events[job.number][-1], EngineFailed)
        else:
            assert answer == alone[number]
    (again,) = harness.run_jobs(harness.job([49, 1, 5], options=options))
    (expected,) = (fresh := make_harness()).run_jobs(fresh.job([49, 1, 5], options=options))
    assert again == expected
    harness.loop.close()
    harness.loop.health.check()


def test_beam_search_job_is_isolated_too(make_harness) -> None:
    options = GenerationOptions(beam_search=BeamSearchParams(2), max_new_tokens=6)
    model = build_model_context(96)
    beams = [
        BeamSearchJob([n, 3], options, BeamSearchParams(2), model, far_deadline()) for n in (49, 50)
    ]
    harness = make_harness(PoisonedDecoder((50,), slots=5))
    plain = harness.job([49, 2, 3], new_tokens=10)
    for job in (beams[1], plain, beams[0]):
        harness.loop.submit(job)
    harness.collector.wait_until_done(*beams, plain)
    assert isinstance(harness.collector.events[beams[1].number][-1], EngineFailed)
    assert tuple(harness.collector.tokens(beams[0])) == found_beams([49, 3], 2, 6)
    (expected,) = (fresh := make_harness()).run_jobs(fresh.job([49, 2, 3], new_tokens=10))
    assert harness.collector.tokens(plain) == expected


def test_failed_verification_falls_back_to_a_decode_step(make_harness) -> None:
    class Unverifying(FakeDecoder):
        def verify(self, slot, ids, start):
            raise EngineFailed("no kernel for several tokens")

    how = {"context": 400, "memorable": 2}
    options = GenerationOptions(sampling=GREEDY, min_new_tokens=60, max_new_tokens=60)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = make_harness(FakeDecoder(**how))
    failing = make_harness(Unverifying(max_draft_tokens=4, **how), max_draft_tokens=4)
    answers = [each.run_jobs(each.job(prompt, options=options)) for each in (plain, failing)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["decode fails", "logits are not finite"])
def test_engine_that_fails_for_all_is_quarantined(make_harness, kind: str) -> None:
    class Broken(FakeDecoder):
        def decode(self, ids, lengths):
            if kind == "decode fails":
                raise EngineFailed("an illegal access")
            return np.full((len(ids), self.info.vocabulary), np.nan, np.float32)

    harness = make_harness(Broken(slots=8))
    for _ in range(3):
        jobs = [harness.job([n, 2, 5], new_tokens=4) for n in range(8)]
        with contextlib.suppress(ModelUnavailable):
            harness.run_jobs(*jobs)
    with pytest.raises(ModelUnavailable):
        harness.loop.submit(harness.job([1, 2, 5]))


def test_failed_move_of_a_slot_ends_all_jobs(make_harness) -> None:
    class Stuck(FakeDecoder):
        def swap(self, first, second, tokens):
            raise EngineFailed("no room for a copy")

    harness = make_harness(Stuck(slots=2))
    jobs = [harness.job([n, 2, 5], new_tokens=4 + 8 * n) for n in range(2)]
    harness.run_jobs(*jobs)
    assert isinstance(harness.collector.events[jobs[1].number][-1], EngineFailed)
    (again,) = harness.run_jobs(harness.job([1, 2, 3]))
    (alone,) = (fresh := make_harness()).run_jobs(fresh.job([1, 2, 3]))
    assert again == alone


def test_bug_in_one_answer_fails_that_answer_only(make_harness, monkeypatch) -> None:
    harness = make_harness(FakeDecoder())
    buggy, other = (harness.job([n, n + 1, 5], new_tokens=6) for n in range(2))
    accept, steps = buggy.accept_logits, []

    def fail_later(logits):
        steps.append(logits)
        if len(steps) > 2:
            raise IndexError("the text of a client")
        return accept(logits)

    monkeypatch.setattr(buggy, "accept_logits", fail_later)
    harness.run_jobs(buggy, other)
    failure = harness.collector.events[buggy.number][-1]
    assert isinstance(failure, EngineFailed)
    assert "client" not in failure.message
    assert len(harness.collector.tokens(other)) == 6
    (again,) = harness.run_jobs(harness.job([1, 2, 5], new_tokens=6))
    assert again == harness.collector.tokens(other)
    harness.loop.close()
    harness.loop.health.check()


@pytest.mark.parametrize("failure", [EngineFailed("a step"), EngineLost("all of it")])
def test_engine_lost_is_stored(make_harness, failure: EngineFailed) -> None:
    harness = make_harness(FakeDecoder(failing_decode=2, failure=failure))
    harness.loop.health.check()
    job = harness.job([1, 2, 5], new_tokens=20)
    harness.loop.submit(job)
    harness.collector.wait_until_done(job)
    harness.loop.close()
    if isinstance(failure, EngineLost):
        with pytest.raises(EngineLost, match="all of it"):
            harness.loop.health.check()
    else:
        harness.loop.health.check()


def test_consecutive_failures_quarantine_the_model(make_harness) -> None:
    class Broken(FakeDecoder):
        def prefill(self, row, ids, start, *, all_logits=False):
            raise EngineFailed("an illegal access")

    harness = make_harness(Broken())
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        job = harness.job([1, 2, 5])
        harness.run_jobs(job)
        assert isinstance(harness.collector.events[job.number][-1], EngineFailed)
    with pytest.raises(ModelUnavailable, match=f"failed {MAX_CONSECUTIVE_FAILURES} times"):
        harness.loop.submit(harness.job([1, 2, 5]))
    harness.loop.health.check()
    harness.loop.close()


def test_successful_call_resets_the_failures(make_harness) -> None:
    harness = make_harness(FakeDecoder(failing_decode=0))
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        harness.decoder.failing_decode = len(harness.decoder.decodes)
        harness.run_jobs(harness.job([1, 2, 5]))
    harness.loop.close()
    harness.loop.health.check()


@pytest.mark.parametrize("prompt_logprobs", [False, True], ids=["failed call", "NaN logits"])
def test_failed_prefill_ends_only_its_job(make_harness, prompt_logprobs: bool) -> None:
    class Picky(FakeDecoder):
        def prefill(self, row, ids, start, *, all_logits=False):
            logits = super().prefill(row, ids, start, all_logits=all_logits)
            if 13 not in ids:
                return logits
            if not all_logits:
                raise EngineFailed("no room on the device")
            return np.full_like(logits, np.nan)

    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=60, max_new_tokens=60)
    (alone,) = (fresh := make_harness()).run_jobs(fresh.job([1, 2, 5], options=endless))
    harness = make_harness(Picky())
    running = harness.job([1, 2, 5], options=endless)
    harness.loop.submit(running)
    harness.collector.wait_for_tokens(running, 1)
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=4, prompt_logprobs=prompt_logprobs)
    bad = harness.job([3, 13, 4], options=options)
    harness.loop.submit(bad)
    harness.collector.wait_until_done(bad, running)
    assert isinstance(harness.collector.events[bad.number][-1], EngineFailed)
    assert harness.collector.tokens(running) == alone
    harness.loop.close()
    assert harness.loop.load == (0, 0)


def test_failed_job_is_not_recorded_as_active(make_harness) -> None:
    harness = make_harness(FakeDecoder(failing_decode=2))
    harness.run_jobs(harness.job([1, 2, 5], new_tokens=20))
    harness.loop.close()
    assert harness.steps.records[-1].active == 0


def test_job_failed_in_prefill_is_not_recorded_as_active(make_harness) -> None:
    class Short(FakeDecoder):
        def prefill(self, row, ids, start, *, all_logits=False):
            if start:
                raise EngineFailed("no room for a second part")
            return super().prefill(row, ids, start, all_logits=all_logits)

    harness = make_harness(Short())
    job = harness.job(range(40))
    harness.run_jobs(job)
    harness.loop.close()
    assert [step.active for step in harness.steps.records] == [1, 0]


def test_long_prefill_does_not_block_decoding(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=2, context=512))
    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=400)
    running = harness.job([1, 2], options=endless)
    harness.loop.submit(running)
    harness.collector.wait_for_tokens(running, 1)
    harness.decoder.parts.clear()
    long = harness.job([n % 50 for n in range(200)], new_tokens=1)
    harness.loop.submit(long)
    harness.collector.wait_until_done(long)
    assert len(harness.decoder.parts) >= 200 / 16
    assert max(tokens for _, tokens in harness.decoder.parts) <= 17
    harness.loop.cancel(running)


def test_close_finishes_accepted_jobs(make_harness) -> None:
    harness = make_harness()
    jobs = [harness.job([n, n + 1]) for n in range(6)]
    for job in jobs:
        harness.loop.submit(job)
    harness.loop.close()
    assert all(harness.collector.is_done(job) for job in jobs)
    with pytest.raises(Overloaded):
        harness.loop.submit(harness.job([1, 2]))


def test_step_elapsed_reports_a_hanging_step(make_harness) -> None:
    harness = make_harness(FakeDecoder(held=threading.Event()))
    assert harness.loop.health.running_s() == 0
    job = harness.job([1, 2])
    harness.loop.submit(job)
    deadline_s = time.monotonic() + TIMEOUT_S
    while harness.loop.health.running_s() < 0.02:
        assert time.monotonic() < deadline_s
    harness.decoder.held.set()
    harness.collector.wait_until_done(job)
    harness.loop.close()
    assert harness.loop.health.running_s() == 0


def test_steps_are_recorded(make_harness) -> None:
    harness = make_harness()
    job = harness.job([1, 2, 3], new_tokens=5)
    (tokens,) = harness.run_jobs(job)
    harness.loop.close()
    assert sum(step.prompt_tokens for step in harness.steps.records) == 3
    # The prefill yields the first token.
    assert sum(step.answer_tokens for step in harness.steps.records) == len(tokens) - 1
