"""Speculative decoding of single requests: fewer steps, identical answers."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.config import SchedulingSettings
from deployments.errors import EngineFailed, InvalidField, ServeError
from deployments.generation.forecast import StepTimes
from deployments.generation.job import Job
from deployments.generation.prompt_lookup import VerifyCost
from deployments.messages import FinishReason, GenerationOptions, SamplingParams
from tests.support.fake_decoder import VOCABULARY, FakeDecoder
from tests.support.scheduler_harness import END, GREEDY, SchedulerHarness

MOST = 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def repetitive(memorable: int = 2, **how: int) -> FakeDecoder:
    """Return a decoder whose next token depends on the last `memorable` tokens.

    Its answers therefore soon repeat.
    """
    return FakeDecoder(context=400, max_draft_tokens=MOST, memorable=memorable, **how)


def options(sampling: SamplingParams, tokens: int = 120) -> GenerationOptions:
    return GenerationOptions(sampling=sampling, max_new_tokens=tokens, min_new_tokens=tokens)


SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.4, seed=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=6),
    SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.2),
)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_do_not_change_answers(make_harness, sampling: SamplingParams) -> None:
    plain, drafting = make_harness(repetitive(), max_draft_tokens=0), make_harness(repetitive())
    answers = [
        harness.run_jobs(harness.job(PROMPT, options=options(sampling)))
        for harness in (plain, drafting)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 120
    assert not plain.decoder.verified
    assert drafting.decoder.verified, "nothing was drafted: the test shows nothing"


class Evens:
    """A constraint that allows even tokens only and fails after `most` tokens."""

    is_complete = False

    def __init__(self, most: int = 1_000) -> None:
        self._left = most

    def compute_allowed(self) -> NDArray[np.bool_]:
        if not self._left:
            raise InvalidField("`grammar` cannot be used: too complex", field="grammar")
        return np.arange(VOCABULARY) % 2 == 0

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self._left -= 1


ORDERS = (
    GenerationOptions(sampling=GREEDY, max_new_tokens=90, min_new_tokens=90, logprobs=3),
    GenerationOptions(sampling=GREEDY, max_new_tokens=90, no_repeat_ngram_size=4, logprobs=0),
    options(SamplingParams(temperature=0.1, seed=1), 90),
    GenerationOptions(sampling=GREEDY, max_new_tokens=90, prompt_logprobs=True),
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("allowed", [None, 1_000, 40])
def test_drafts_do_not_change_logprobs_and_reasons(
    make_harness, order: GenerationOptions, allowed: int | None
) -> None:
    """Text, log probabilities, and finish reason or error of the streams are equal."""
    streams = []
    for most in (0, MOST):
        harness = make_harness(repetitive(1, slots=1), max_draft_tokens=most)
        constraints = [Evens(allowed) if allowed else None for _ in range(2)]
        jobs = [harness.job(PROMPT, options=order, constraint=each) for each in constraints]
        harness.run_jobs(*jobs)  # the second job waits for the only slot
        streams.append([summarize_stream(harness, job) for job in jobs])
    assert streams[0] == streams[1]
    assert harness.decoder.verified, "nothing was drafted: the test shows nothing"


def summarize_stream(harness: SchedulerHarness, job: Job) -> list[object]:
    """Return the content of a stream, with joined chunks and without step numbers and times."""
    started, *chunks = harness.collector.events[job.number]
    error = chunks.pop() if isinstance(chunks[-1], ServeError) else None
    finished = chunks[-1].finished
    tokens = [token for chunk in chunks for token in chunk.tokens]
    reason = finished and (finished.reason, finished.generated_tokens)
    text = "".join(chunk.text for chunk in chunks)
    return [started.prompt, text, tokens, reason, error and error.message]


def test_repetitive_answer_takes_fewer_steps(make_harness) -> None:
    harness = make_harness(repetitive())
    harness.run_jobs(harness.job(PROMPT, options=options(GREEDY)))
    calls = len(harness.decoder.decodes) + len(harness.decoder.verified)
    assert calls < 120 / 2
    assert max(harness.decoder.verified) == MOST + 1


def test_records_count_draft_tokens(make_harness) -> None:
    harness = make_harness(repetitive())
    harness.run_jobs(harness.job(PROMPT, options=options(GREEDY)))
    steps = harness.steps.records
    assert sum(step.answer_tokens for step in steps) == 120
    assert sum(step.draft_tokens for step in steps) == sum(harness.decoder.verified) - len(
        harness.decoder.verified
    )
    accepted = sum(step.accepted_draft_tokens for step in steps)
    assert accepted == 119 - len(harness.decoder.decodes) - len(harness.decoder.verified)
    assert 0 < accepted <= sum(step.draft_tokens for step in steps)


def test_verified_tokens_share_the_time_of_their_step(make_harness, monkeypatch) -> None:
    measured: list[tuple[int, float]] = []
    monkeypatch.setattr(
        StepTimes, "record_step", lambda _, *values: measured.append((values[0], sum(values[1:])))
    )
    harness = make_harness(repetitive())
    harness.run_jobs(harness.job(PROMPT, options=options(GREEDY)))
    harness.scheduler.close()
    steps = [step for step in harness.steps.records if step.answer_tokens]
    # The prefill yields the first token of the first step.
    tokens = [step.answer_tokens - bool(step.prompt_tokens) for step in steps]
    assert max(tokens) > 1, "the test shows nothing"
    assert measured == [
        (1, pytest.approx(step.step_s / count)) for step, count in zip(steps, tokens, strict=True)
    ]


def test_only_steps_of_one_slot_show_the_cost_of_a_single_token(make_harness, monkeypatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(VerifyCost, "update", lambda _, *values: measured.append(values[1]))
    harness = make_harness(FakeDecoder())
    jobs = [harness.job([*PROMPT, n], options=options(GREEDY, 10 + n)) for n in range(2)]
    harness.run_together(*jobs)
    assert 2 in harness.decoder.decodes, "the test shows nothing"
    assert measured == [1] * harness.decoder.decodes.count(1)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_max_draft_tokens_limits_drafts(make_harness, most: int) -> None:
    harness = make_harness(repetitive(), max_draft_tokens=most)
    harness.run_jobs(harness.job(PROMPT, options=options(GREEDY)))
    assert max(harness.decoder.verified, default=1) == most + 1


def test_decoder_without_verification_gets_no_drafts(make_harness) -> None:
    class Unable(FakeDecoder):
        def verify(self, slot, ids, start):
            self.verified.append(len(ids))
            raise EngineFailed("no kernel for several tokens")

    harness = make_harness(Unable(context=400, memorable=2))
    harness.run_jobs(harness.job(PROMPT, options=options(GREEDY)))
    assert not harness.decoder.verified
    assert len(harness.decoder.decodes) == 119


def test_answer_may_end_within_a_draft(make_harness) -> None:
    """Verified tokens after the end are dropped."""
    harness = make_harness(repetitive())
    long = harness.job(PROMPT, options=options(GREEDY))
    (tokens,) = harness.run_jobs(long)
    last = tokens[60]
    shorter = GenerationOptions(sampling=GREEDY, max_new_tokens=120, stop=(f"w{last}",))
    job = harness.job(PROMPT, options=shorter)
    (stopped,) = harness.run_jobs(job)
    finished = harness.collector.events[job.number][-1].finished
    assert finished.reason is FinishReason.STOP
    assert stopped == tokens[: len(stopped)]
    assert finished.generated_tokens == len(stopped) == tokens.index(last) + 1


def test_drafts_fill_a_slot_to_the_last_token(make_harness) -> None:
    harness = make_harness(FakeDecoder(context=60, max_draft_tokens=MOST, memorable=2))
    never_end = GenerationOptions(sampling=GREEDY, min_new_tokens=10_000)
    (tokens,) = harness.run_jobs(harness.job(PROMPT, options=never_end))
    assert len(tokens) == 60 - len(PROMPT)


def test_several_jobs_are_not_drafted(make_harness) -> None:
    harness = make_harness(repetitive())
    harness.run_together(*(harness.job([*PROMPT, n], options=options(GREEDY)) for n in range(2)))
    alone_for = harness.decoder.decodes.count(1)
    assert harness.decoder.decodes.count(2) >= 110
    assert len(harness.decoder.verified) + alone_for <= 10, "only a lone job is drafted"


@pytest.mark.parametrize("seed", range(6))
def test_random_other_jobs_do_not_change_answers(seed: int) -> None:
    """Answers with drafts at random arrival times equal answers without drafts.

    Drafts are made only while a single job runs, so drafting starts and stops at random.
    """
    chance = random.Random(seed)
    prompts = [chance.choices(range(END), k=chance.randint(2, 20)) for _ in range(16)]
    orders = [
        options(SamplingParams(temperature=chance.choice([0, 0.5]), seed=n), chance.randint(1, 60))
        for n in range(len(prompts))
    ]
    plain = answers_of(prompts, orders, [0.0] * len(prompts), max_draft_tokens=0)
    arrivals = [chance.choice([0.0, 0.0, 0.02]) for _ in prompts]
    assert answers_of(prompts, orders, arrivals, max_draft_tokens=MOST) == plain


def answers_of(
    prompts: list[list[int]],
    orders: list[GenerationOptions],
    pauses_s: list[float],
    max_draft_tokens: int,
) -> list[list[int]]:
    rules = SchedulingSettings(
        max_prefill_chunk_tokens=16, min_prefill_chunk_tokens=4, max_draft_tokens=max_draft_tokens
    )
    harness = SchedulerHarness(repetitive(), rules)
    harness.scheduler.start()
    pause = threading.Event()
    jobs = []
    for prompt, order, pause_s in zip(prompts, orders, pauses_s, strict=True):
        jobs.append(harness.job(prompt, options=order))
        harness.scheduler.submit(jobs[-1])
        pause.wait(pause_s)
    harness.collector.wait_until_done(*jobs)
    harness.scheduler.close()
    # No check for drafts: on a busy machine all jobs may overlap, and then nothing is drafted.
    return [harness.collector.tokens(job) for job in jobs]
