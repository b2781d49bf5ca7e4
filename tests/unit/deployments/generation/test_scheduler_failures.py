"""Failures of an engine: which jobs end, and when the model is quarantined."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from deployments.errors import DeadlineExceeded, EngineFailed, EngineLost, ModelUnavailable
from deployments.generation.beam_search import BeamSearchJob
from deployments.health import MAX_CONSECUTIVE_FAILURES
from deployments.messages import BeamSearchParams, GenerationOptions, SamplingParams
from tests.support.fake_decoder import FakeDecoder
from tests.support.fakes import TIMEOUT_S, far_deadline
from tests.support.scheduler_harness import GREEDY, build_model_context, found_beams


def test_step_that_fails_once_changes_no_answer(make_harness) -> None:
    jobs = [([n, n + 1, 5], 20) for n in range(3)]
    sound, harness = make_harness(), make_harness(FakeDecoder(failing_decode=2))
    answers = [
        each.run_jobs(*(each.job(prompt, new_tokens=tokens) for prompt, tokens in jobs))
        for each in (sound, harness)
    ]
    assert answers[0] == answers[1]
    assert harness.decoder.failing_decode == -1, "no step failed: the test shows nothing"


class TwiceFailingDecoder(FakeDecoder):
    """Decoder that fails twice in a row, then works."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def decode(self, ids, lengths):
        if len(self.decodes) == 3 and self.failures < 2:
            self.failures += 1
            raise EngineFailed("a temporary error")
        return super().decode(ids, lengths)


def test_step_that_fails_twice_changes_no_answer_if_no_slot_is_at_fault(make_harness) -> None:
    jobs = [([n, n + 1, 5], 20) for n in range(3)]
    sound, harness = make_harness(), make_harness(TwiceFailingDecoder())
    answers = [
        each.run_jobs(*(each.job(prompt, new_tokens=tokens) for prompt, tokens in jobs))
        for each in (sound, harness)
    ]
    assert answers[0] == answers[1]
    assert harness.decoder.failures == 2, "no step failed: the test shows nothing"


class PoisonedDecoder(FakeDecoder):
    """Decoder whose decode steps fail while a slot in use contains one of the tokens `poisons`."""

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
    """Token 50 makes steps fail. The logit bias keeps it out of the answers."""
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
    harness.scheduler.close()
    harness.scheduler.health.check()


def test_beam_search_job_is_isolated_too(make_harness) -> None:
    options = GenerationOptions(beam_search=BeamSearchParams(2), max_new_tokens=6)
    model = build_model_context(96)
    beams = [
        BeamSearchJob([n, 3], options, BeamSearchParams(2), model, far_deadline()) for n in (49, 50)
    ]
    harness = make_harness(PoisonedDecoder((50,), slots=5))
    plain = harness.job([49, 2, 3], new_tokens=10)
    for job in (beams[1], plain, beams[0]):
        harness.scheduler.submit(job)
    harness.collector.wait_until_done(*beams, plain)
    assert isinstance(harness.collector.events[beams[1].number][-1], EngineFailed)
    assert tuple(harness.collector.tokens(beams[0])) == found_beams([49, 3], 2, 6)
    (expected,) = (fresh := make_harness()).run_jobs(fresh.job([49, 2, 3], new_tokens=10))
    assert harness.collector.tokens(plain) == expected


def test_failed_verification_falls_back_to_a_decode_step(make_harness) -> None:
    class Unverifying(FakeDecoder):
        def verify(self, slot, ids, start):
            self.verified.append(len(ids))
            raise EngineFailed("no kernel for several tokens")

    how = {"context": 400, "memorable": 2}
    options = GenerationOptions(sampling=GREEDY, min_new_tokens=60, max_new_tokens=60)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = make_harness(FakeDecoder(**how))
    failing = make_harness(Unverifying(max_draft_tokens=4, **how), max_draft_tokens=4)
    answers = [each.run_jobs(each.job(prompt, options=options)) for each in (plain, failing)]
    assert answers[0] == answers[1]
    assert len(failing.decoder.verified) < 30, "after failures, few steps try it again"


@pytest.mark.usefixtures("long_quarantine")
@pytest.mark.parametrize("kind", ["decode fails", "logits are not finite"])
def test_engine_that_fails_for_all_is_quarantined(make_harness, kind: str) -> None:
    class BrokenDecode(FakeDecoder):
        def decode(self, ids, lengths):
            if kind == "decode fails":
                raise EngineFailed("an illegal access")
            return np.full((len(ids), self.info.vocabulary), np.nan, np.float32)

    harness = make_harness(BrokenDecode(slots=8))
    for _ in range(3):
        jobs = [harness.job([n, 2, 5], new_tokens=4) for n in range(8)]
        with contextlib.suppress(ModelUnavailable):
            harness.run_jobs(*jobs)
    with pytest.raises(ModelUnavailable):
        harness.scheduler.submit(harness.job([1, 2, 5]))


def test_failed_move_of_a_slot_ends_all_jobs(make_harness) -> None:
    class Stuck(FakeDecoder):
        def swap(self, first, second, tokens):
            raise EngineFailed("no room for a copy")

    harness = make_harness(Stuck(slots=2))
    jobs = [harness.job([n, 2, 5], new_tokens=4 + 8 * n) for n in range(2)]
    harness.run_together(*jobs)
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
    harness.scheduler.close()
    harness.scheduler.health.check()


@pytest.mark.parametrize("failure", [EngineFailed("a step"), EngineLost("all of it")])
def test_engine_lost_is_stored(make_harness, failure: EngineFailed) -> None:
    harness = make_harness(FakeDecoder(failing_decode=2, failure=failure))
    harness.scheduler.health.check()
    job = harness.job([1, 2, 5], new_tokens=20)
    harness.scheduler.submit(job)
    harness.collector.wait_until_done(job)
    harness.scheduler.close()
    if isinstance(failure, EngineLost):
        with pytest.raises(EngineLost, match="all of it"):
            harness.scheduler.health.check()
    else:
        harness.scheduler.health.check()


@pytest.mark.usefixtures("long_quarantine")
def test_consecutive_failures_quarantine_the_model(make_harness) -> None:
    class BrokenPrefill(FakeDecoder):
        def prefill(self, row, ids, start, *, all_logits=False):
            raise EngineFailed("an illegal access")

    harness = make_harness(BrokenPrefill())
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        job = harness.job([1, 2, 5])
        harness.run_jobs(job)
        assert isinstance(harness.collector.events[job.number][-1], EngineFailed)
    with pytest.raises(ModelUnavailable, match=f"failed {MAX_CONSECUTIVE_FAILURES} times"):
        harness.scheduler.submit(harness.job([1, 2, 5]))
    harness.scheduler.health.check()
    harness.scheduler.close()


def test_successful_call_resets_the_failures(make_harness) -> None:
    harness = make_harness(FakeDecoder(failing_decode=0))
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        harness.decoder.failing_decode = len(harness.decoder.decodes)
        harness.run_jobs(harness.job([1, 2, 5]))
        assert harness.decoder.failing_decode == -1, "no step failed"
    harness.scheduler.close()
    harness.scheduler.health.check()


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
    harness.scheduler.submit(running)
    harness.collector.wait_for_tokens(running, 1)
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=4, prompt_logprobs=prompt_logprobs)
    bad = harness.job([3, 13, 4], options=options)
    harness.scheduler.submit(bad)
    harness.collector.wait_until_done(bad, running)
    assert isinstance(harness.collector.events[bad.number][-1], EngineFailed)
    assert harness.collector.tokens(running) == alone
    harness.scheduler.close()
    assert harness.scheduler.slot_use == (0, 0)


def test_failed_job_is_not_recorded_as_active(make_harness) -> None:
    harness = make_harness(FakeDecoder(failing_decode=2, failure=EngineLost("all of it")))
    job = harness.job([1, 2, 5], new_tokens=20)
    harness.run_jobs(job)
    harness.scheduler.close()
    assert isinstance(harness.collector.events[job.number][-1], EngineLost)
    assert harness.steps.records[-1].active == 0


@pytest.mark.parametrize("failing_decode", [-1, 2])
def test_time_without_jobs_is_part_of_no_step(make_harness, failing_decode: int) -> None:
    lost = EngineLost("all of it")
    harness = make_harness(FakeDecoder(failing_decode=failing_decode, failure=lost))
    harness.run_jobs(harness.job([1, 2, 5], new_tokens=20))
    time.sleep(0.1)
    harness.steps.records.clear()
    started_s = time.perf_counter()
    harness.run_jobs(harness.job([3, 4], new_tokens=4))
    elapsed_s = time.perf_counter() - started_s
    harness.scheduler.close()
    assert 0 < sum(step.step_s for step in harness.steps.records) <= elapsed_s


def test_job_failed_in_prefill_is_not_recorded_as_active(make_harness) -> None:
    class Short(FakeDecoder):
        def prefill(self, row, ids, start, *, all_logits=False):
            if start:
                raise EngineFailed("no room for a second part")
            return super().prefill(row, ids, start, all_logits=all_logits)

    harness = make_harness(Short())
    job = harness.job(range(40))
    harness.run_jobs(job)
    harness.scheduler.close()
    assert [step.active for step in harness.steps.records] == [1, 0]


class PausingDecoder(FakeDecoder):
    """Decoder that cannot move slots. Its first decode call with two slots waits for `go_on`."""

    def __init__(self, held: threading.Event) -> None:
        super().__init__(slots=2, held=held)
        self.is_paused, self.go_on = threading.Event(), threading.Event()

    def decode(self, ids, lengths):
        if len(ids) == 2:
            self.is_paused.set()
            assert self.go_on.wait(TIMEOUT_S)
        return super().decode(ids, lengths)

    def copy(self, source, target, tokens):
        raise EngineFailed("no kernel for copies")

    def swap(self, first, second, tokens):
        raise EngineFailed("no kernel for swaps")


@pytest.mark.parametrize("leaving", ["cancelled", "expired"])
def test_dropped_jobs_end_even_if_a_slot_cannot_be_moved(make_harness, leaving: str) -> None:
    held = threading.Event()
    decoder = PausingDecoder(held)
    harness = make_harness(decoder)
    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=60, max_new_tokens=60)
    first, second = (harness.job([n, 2], options=endless) for n in (1, 2))
    waiting = harness.job([3, 4])
    harness.scheduler.submit(first)
    harness.scheduler.submit(second)
    held.set()
    assert decoder.is_paused.wait(TIMEOUT_S)
    harness.scheduler.submit(waiting)
    waiting.deadline_s = 0.0
    if leaving == "cancelled":
        harness.scheduler.cancel(first)
    else:
        first.deadline_s = 0.0
    decoder.go_on.set()
    ended = [second, waiting] if leaving == "cancelled" else [first, second, waiting]
    harness.collector.wait_until_done(*ended)
    last = {job.number: harness.collector.events[job.number][-1] for job in ended}
    assert isinstance(last.pop(second.number), EngineFailed)
    assert all(isinstance(event, DeadlineExceeded) for event in last.values())


def test_engine_lost_while_a_slot_is_moved_fails_the_health_check(make_harness) -> None:
    class Lost(FakeDecoder):
        def copy(self, source, target, tokens):
            raise EngineLost("all processes have ended")

        swap = copy

    harness = make_harness(Lost())
    short, long = harness.job([1, 2], new_tokens=4), harness.job([3, 4], new_tokens=40)
    harness.run_together(short, long)
    assert isinstance(harness.collector.events[long.number][-1], EngineLost)
    with pytest.raises(EngineLost, match="have ended"):
        harness.scheduler.health.check()
