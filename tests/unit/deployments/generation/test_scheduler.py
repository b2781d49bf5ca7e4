from __future__ import annotations

import random
import threading

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import DeadlineExceeded, Overloaded
from deployments.generation import kv_slots
from deployments.generation.admission import AdmissionQueue
from deployments.generation.beam_search import BeamSearchJob
from deployments.generation.job import Job
from deployments.generation.lengths import AnswerLengths
from deployments.generation.step_executor import MAX_LOGPROB_CHUNK_TOKENS
from deployments.messages import (
    BeamSearchParams,
    Chunk,
    FinishReason,
    GenerationOptions,
    SamplingParams,
)
from tests.support.fake_decoder import FakeDecoder, RecurrentFakeDecoder, SteppedDecoder
from tests.support.fakes import far_deadline
from tests.support.scheduler_harness import END, GREEDY, SYSTEM, build_model_context, found_beams
from tests.support.waiting import wait_for


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
@pytest.mark.parametrize("kind", [FakeDecoder, RecurrentFakeDecoder])
@pytest.mark.parametrize("min_chunk_end", [0, 20])
def test_answer_is_independent_of_other_jobs(
    make_harness,
    kind: type[FakeDecoder],
    min_chunk_end: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random prompts and lengths. Some prompts share a prefix, and six jobs are cancelled."""
    monkeypatch.setattr(kv_slots, "MIN_SHARED_TOKENS", 8)
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
        harness = make_harness(kind(min_chunk_end=min_chunk_end))
        alone += harness.run_jobs(harness.job(prompt, options=options))
    crowd = make_harness(kind(min_chunk_end=min_chunk_end))
    jobs = [crowd.job(p, options=o) for p, o in zip(prompts, orders, strict=True)]
    dropped = set(chance.sample(range(len(jobs)), 6))
    for number, job in enumerate(jobs):
        crowd.scheduler.submit(job)
        if number in dropped:
            threading.Timer(chance.random() * 0.02, crowd.scheduler.cancel, (job,)).start()
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


def test_prompt_logprobs_limit_the_tokens_of_a_chunk(make_harness) -> None:
    harness = make_harness(FakeDecoder(context=220), max_prefill_chunk_tokens=200)
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=2, prompt_logprobs=True)
    harness.run_jobs(harness.job([n % 50 for n in range(200)], options=options))
    assert max(tokens for _, tokens in harness.decoder.parts) <= MAX_LOGPROB_CHUNK_TOKENS


def test_first_token_does_not_wait_for_the_decode_step(make_harness) -> None:
    class HeldDecode(FakeDecoder):
        def prefill(self, slot, ids, start, *, all_logits=False):
            logits = super().prefill(slot, ids, start, all_logits=all_logits)
            held.clear()  # the next call waits
            return logits

    held = threading.Event()
    held.set()
    harness = make_harness(HeldDecode(held=held))
    job = harness.job([1, 2])
    harness.scheduler.submit(job)
    harness.collector.wait_for_tokens(job, 1)
    assert not harness.decoder.decodes
    held.set()
    harness.collector.wait_until_done(job)


def test_waiting_jobs_run_in_order(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1))
    jobs = [harness.job([n, n + 1, n + 2]) for n in range(5)]
    harness.run_jobs(*jobs)
    assert [job.number for job in jobs] == list(harness.collector.events)


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
    harness = make_harness(FakeDecoder(slots=3))
    options = GenerationOptions(beam_search=BeamSearchParams(3), max_new_tokens=4)
    first = harness.job([1, 2], new_tokens=4)
    wide = BeamSearchJob(
        [3, 4], options, BeamSearchParams(3), build_model_context(96), far_deadline()
    )
    last = harness.job([5, 6], new_tokens=4)
    harness.run_together(first, wide, last)
    assert list(harness.collector.events) == [first.number, wide.number, last.number]


def test_load_counts_every_slot_of_a_beam_search(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=4, held=threading.Event()))
    options = GenerationOptions(beam_search=BeamSearchParams(3), max_new_tokens=4)
    job = BeamSearchJob(
        [3, 4], options, BeamSearchParams(3), build_model_context(96), far_deadline()
    )
    harness.scheduler.submit(job)
    wait_for(lambda: harness.scheduler.slot_use == (3, 0))
    harness.decoder.held.set()
    harness.collector.wait_until_done(job)


def test_full_queue_rejects_at_once(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, held=threading.Event()), max_waiting_requests=2)
    first = harness.job([1, 2])
    harness.scheduler.submit(first)
    wait_for(lambda: harness.scheduler.slot_use == (1, 0))
    others = [harness.job([3, 4]), harness.job([5, 6])]
    for job in others:
        harness.scheduler.submit(job)
    with pytest.raises(Overloaded):
        harness.scheduler.submit(harness.job([7, 8]))
    harness.decoder.held.set()
    harness.collector.wait_until_done(first, *others)


def test_cancelled_job_frees_its_slot_within_a_step(make_harness) -> None:
    decoder = SteppedDecoder(3, slots=1, context=4096)
    harness = make_harness(decoder)
    never_end = GenerationOptions(sampling=GREEDY, min_new_tokens=4000, max_new_tokens=4000)
    endless = harness.job([1, 2], options=never_end)
    harness.scheduler.submit(endless)
    harness.collector.wait_for_tokens(endless, 3)
    harness.scheduler.cancel(endless)
    decodes = len(decoder.decodes)
    decoder.permits.release(4000)
    # After slow steps, the scheduler predicts that the endless job would outlast a usual deadline.
    next_one = harness.job([3, 4], new_tokens=2, deadline_s=deadline_after(1e6))
    harness.run_jobs(next_one)
    assert len(harness.collector.tokens(endless)) < 4000
    assert len(decoder.decodes) - decodes <= 4
    assert not harness.collector.is_done(endless)


def test_waiting_job_can_be_cancelled(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, held=threading.Event()))
    first, second, third = (harness.job([n, n + 1]) for n in range(3))
    for job in (first, second, third):
        harness.scheduler.submit(job)
    harness.scheduler.cancel(second)
    harness.decoder.held.set()
    harness.collector.wait_until_done(first, third)
    assert second.number not in harness.collector.events


def test_expired_jobs_end(make_harness) -> None:
    harness = make_harness(FakeDecoder(slots=1, context=4096, held=threading.Event()))
    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=4000)
    running, waiting = harness.job([1, 2], options=endless), harness.job([3, 4])
    harness.scheduler.submit(running)
    wait_for(lambda: harness.scheduler.slot_use == (1, 0))
    harness.scheduler.submit(waiting)
    running.deadline_s = waiting.deadline_s = 0.0
    harness.decoder.held.set()
    harness.collector.wait_until_done(running, waiting)
    assert isinstance(harness.collector.events[running.number][-1], DeadlineExceeded)
    assert isinstance(harness.collector.events[waiting.number][-1], DeadlineExceeded)


def test_long_prefill_does_not_block_decoding(make_harness) -> None:
    decoder = SteppedDecoder(0, slots=2, context=512)
    harness = make_harness(decoder)
    endless = GenerationOptions(sampling=GREEDY, min_new_tokens=400)
    running = harness.job([1, 2], options=endless)
    harness.scheduler.submit(running)
    harness.collector.wait_for_tokens(running, 1)
    decoder.parts.clear()
    long = harness.job([n % 50 for n in range(200)], new_tokens=1)
    harness.scheduler.submit(long)
    decoder.permits.release(1000)
    harness.collector.wait_until_done(long)
    assert len(decoder.parts) >= 200 / 16
    assert max(tokens for _, tokens in decoder.parts) <= 17
    harness.scheduler.cancel(running)


def test_close_finishes_accepted_jobs(make_harness) -> None:
    harness = make_harness()
    jobs = [harness.job([n, n + 1]) for n in range(6)]
    for job in jobs:
        harness.scheduler.submit(job)
    harness.scheduler.close()
    harness.scheduler.check_thread()
    assert all(harness.collector.is_done(job) for job in jobs)
    with pytest.raises(Overloaded):
        harness.scheduler.submit(harness.job([1, 2]))


def test_admission_learns_from_jobs_that_end(make_harness, monkeypatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(AdmissionQueue, "record_end", lambda _, number: ended.append(number))
    harness = make_harness()
    jobs = [harness.job([n, n + 1]) for n in range(2)]
    harness.run_jobs(*jobs)
    harness.scheduler.close()
    assert sorted(ended) == [job.number for job in jobs]


@pytest.mark.parametrize("is_cut", [False, True])
def test_forecast_learns_which_answers_were_cut(make_harness, monkeypatch, *, is_cut: bool) -> None:
    lengths: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        AnswerLengths, "record", lambda _, tokens, *, is_cut: lengths.append((tokens, is_cut))
    )
    harness = make_harness()
    (tokens,) = harness.run_jobs(harness.job([1, 2], new_tokens=3))
    stop = () if is_cut else (f"w{tokens[-1]}",)
    options = GenerationOptions(sampling=GREEDY, max_new_tokens=3, stop=stop)
    lengths.clear()
    harness.run_jobs(harness.job([1, 2], options=options))
    assert lengths == [(3, is_cut)]


def test_step_elapsed_reports_a_hanging_step(make_harness) -> None:
    harness = make_harness(FakeDecoder(held=threading.Event()))
    assert harness.scheduler.health.running_s() == 0
    job = harness.job([1, 2])
    harness.scheduler.submit(job)
    wait_for(lambda: harness.scheduler.health.running_s() >= 0.02)
    harness.decoder.held.set()
    harness.collector.wait_until_done(job)
    harness.scheduler.close()
    assert harness.scheduler.health.running_s() == 0


def test_steps_are_recorded(make_harness) -> None:
    harness = make_harness()
    job = harness.job([1, 2, 3], new_tokens=5)
    (tokens,) = harness.run_jobs(job)
    harness.scheduler.close()
    assert sum(step.prompt_tokens for step in harness.steps.records) == 3
    assert sum(step.answer_tokens for step in harness.steps.records) == len(tokens)


def test_first_token_counts_as_generated(make_harness) -> None:
    harness = make_harness()
    harness.run_jobs(harness.job([1, 2, 3], new_tokens=1))
    harness.scheduler.close()
    assert sum(step.answer_tokens for step in harness.steps.records) == 1
