"""Overload in virtual time: admitted requests end in time, and the others are rejected at once."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from deployments.config import SchedulingSettings
from deployments.errors import Overloaded
from tests.support.virtual_time import (
    PREFILL_TOKEN_S,
    SLOTS,
    STEP_S,
    STEP_SLOT_S,
    Arrival,
    JobOutcome,
    VirtualScheduler,
    poisson_arrivals,
)

PROMPT_TOKENS = 32
MAX_WAITING_REQUESTS = SchedulingSettings().max_waiting_requests


def capacity(new_tokens: float) -> float:
    """Return the answers per second if all slots are used and the prefix cache has no effect."""
    decode_s = (STEP_S + STEP_SLOT_S * SLOTS) * new_tokens / SLOTS
    return 1 / (decode_s + PROMPT_TOKENS * PREFILL_TOKEN_S)


def goodput(outcomes: list[JobOutcome], from_s: float, until_s: float) -> float:
    """Return the answers per second from `from_s` to `until_s` that ended within their timeouts."""
    count = sum(each.is_in_time for each in outcomes if from_s <= each.ended_s < until_s)
    return count / (until_s - from_s)


@pytest.mark.parametrize("factor", [1.2, 3.0, 10.0])
@pytest.mark.parametrize(
    ("new_tokens", "timeout_s", "seconds"),
    [pytest.param(16, 2.0, 15.0, id="short"), pytest.param(500, 30.0, 120.0, id="long")],
)
def test_overload_keeps_goodput(
    monkeypatch, factor: float, new_tokens: int, timeout_s: float, seconds: float
) -> None:
    """The goodput stays near the capacity at every overload factor.

    With a queue in order of arrival, the goodput for answers of 500 tokens was 0.75, 0.04 and 0.00
    of the capacity at the three factors.
    """
    scheduler = VirtualScheduler(monkeypatch)
    outcomes = scheduler.replay(
        poisson_arrivals(
            factor * capacity(new_tokens),
            seconds,
            seed=1,
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=new_tokens,
            timeout_s=timeout_s,
        )
    )
    assert goodput(outcomes, timeout_s, seconds) >= 0.9 * capacity(new_tokens)
    errors = [each.error for each in outcomes if each.error is not None]
    accepted = [each for each in outcomes if not each.is_rejected]
    assert errors
    assert sum(each.is_in_time for each in accepted) >= 0.8 * len(accepted)
    for error in errors:
        if isinstance(error, Overloaded):
            assert error.retry_after_s is not None
            assert 1 <= error.retry_after_s <= 2 * timeout_s


@pytest.mark.parametrize("factor", [1.2, 10.0])
def test_overload_keeps_goodput_of_answers_of_unknown_length(monkeypatch, factor: float) -> None:
    """Answers end after 100 tokens on average. Their limit is 500 tokens."""
    scheduler = VirtualScheduler(monkeypatch, end_probability=0.01)
    arrivals = poisson_arrivals(
        factor * capacity(100), 60, 1, prompt_tokens=PROMPT_TOKENS, new_tokens=500, timeout_s=8.0
    )
    outcomes = scheduler.replay(
        dataclasses.replace(each, seed=number) for number, each in enumerate(arrivals)
    )
    assert goodput(outcomes, 8, 60) >= 0.85 * capacity(100)


def test_idle_decoder_admits_what_cannot_end_in_time(monkeypatch) -> None:
    scheduler = VirtualScheduler(monkeypatch)
    measured = Arrival(0.0, prompt_tokens=32, new_tokens=100, timeout_s=60.0)
    hopeless = Arrival(10.0, prompt_tokens=32, new_tokens=1_000, timeout_s=2.0)
    second = dataclasses.replace(hopeless, at_s=10.5)
    outcomes = scheduler.replay([measured, hopeless, second])
    assert [each.is_rejected for each in outcomes] == [False, False, True]
    assert outcomes[1].first_token_s


def test_low_load_rejects_nothing(monkeypatch) -> None:
    """Before the first answer, the forecast must not expect answers as long as the token limit."""
    scheduler = VirtualScheduler(monkeypatch, end_probability=0.01)
    arrivals = poisson_arrivals(
        0.5 * capacity(100), 40, 3, prompt_tokens=32, new_tokens=4_000, timeout_s=120.0
    )
    outcomes = scheduler.replay(
        dataclasses.replace(each, seed=number) for number, each in enumerate(arrivals)
    )
    assert not [each for each in outcomes if each.error]


def test_chat_is_admitted_beside_answers_that_are_cut(monkeypatch) -> None:
    """Completions cut at 16 tokens run all the time. Only the context limits the chats."""
    completions = [Arrival(0.1 * n, 32, 16, timeout_s=120.0) for n in range(500)]
    chats = [Arrival(30.01 + 5 * n, 32, 4_000, timeout_s=120.0, seed=n) for n in range(3)]
    arrivals = sorted((*completions, *chats), key=lambda each: each.at_s)
    outcomes = VirtualScheduler(monkeypatch, end_probability=0.005).replay(arrivals)
    assert all(each.is_in_time for each in outcomes if each.arrival.new_tokens == 4_000)


def test_quiet_client_is_served_beside_a_greedy_one(monkeypatch) -> None:
    """The greedy client sends four times the capacity, and the quiet client a fifth of it."""
    shape = {"prompt_tokens": 32, "new_tokens": 50, "timeout_s": 10.0}
    greedy = poisson_arrivals(4 * capacity(50), 40, 1, client="greedy", **shape)
    quiet = poisson_arrivals(0.2 * capacity(50), 40, 2, client="quiet", **shape)
    arrivals = sorted((*greedy, *quiet), key=lambda each: each.at_s)
    outcomes = VirtualScheduler(monkeypatch).replay(arrivals)
    of_quiet = [each for each in outcomes if each.arrival.client == "quiet"]
    assert all(each.is_in_time for each in of_quiet)
    # A quiet request only waits for a free slot. Greedy requests queue for most of their 10 s.
    assert max(each.first_token_s - each.arrival.at_s for each in of_quiet) < 2.0
    assert goodput(outcomes, 10, 40) >= 0.95 * capacity(50)


def test_interactive_requests_precede_batch_requests(monkeypatch) -> None:
    shape = {"prompt_tokens": 32, "new_tokens": 50, "timeout_s": 20.0}
    batch = poisson_arrivals(2 * capacity(50), 30, 1, priority=1, **shape)
    interactive = poisson_arrivals(0.5 * capacity(50), 30, 2, priority=0, **shape)
    arrivals = sorted((*batch, *interactive), key=lambda each: each.at_s)
    outcomes = VirtualScheduler(monkeypatch).replay(arrivals)
    waits = [
        each.first_token_s - each.arrival.at_s for each in outcomes if not each.arrival.priority
    ]
    assert all(each.is_in_time for each in outcomes if not each.arrival.priority)
    assert max(waits) < 3.0
    assert sum(each.is_in_time for each in outcomes if each.arrival.priority)


def test_full_queue_drops_the_last_in_turn_not_the_newcomer(monkeypatch) -> None:
    greedy_count = 150
    greedy = [Arrival(0.005 * n, 32, 50, 120.0, client="greedy") for n in range(greedy_count)]
    quiet = Arrival(0.8, 32, 50, 120.0, client="quiet")
    outcomes = VirtualScheduler(monkeypatch).replay([*greedy, quiet])
    assert outcomes[-1].is_in_time
    kinds = Counter(type(each.error) for each in outcomes)
    assert kinds[Overloaded] == greedy_count + 1 - MAX_WAITING_REQUESTS - SLOTS
    dropped = [each for each in outcomes if each.error and not each.is_rejected]
    assert [each.arrival.client for each in dropped] == ["greedy"]


def test_long_prompts_starve_neither_running_answers_nor_short_prompts(monkeypatch) -> None:
    """Six prompts have about 3,000 tokens each: 18 s of prefill in all."""
    max_step_s = 0.2  # prefills extend a step by at most max_prefill_stall_ms and one chunk
    running = Arrival(0.0, prompt_tokens=32, new_tokens=100, timeout_s=120.0)
    long = [Arrival(0.5 + 0.01 * n, 3_000 + n, 10, 120.0) for n in range(6)]
    short = Arrival(1.0, prompt_tokens=40, new_tokens=10, timeout_s=120.0)
    answered, *others, quick = VirtualScheduler(monkeypatch).replay([running, *long, short])
    assert quick.first_token_s - 1.0 < 1.0
    assert answered.ended_s < running.new_tokens * max_step_s
    assert all(each.is_in_time for each in others)


def test_short_prompts_do_not_starve_a_long_one(monkeypatch) -> None:
    # Alone, the long prompt is prefilled in 3 s. The short ones need 0.6 s per second.
    max_first_token_s = 10.0
    long = Arrival(0.0, prompt_tokens=3_000, new_tokens=10, timeout_s=120.0)
    short = poisson_arrivals(6.0, 20, 1, prompt_tokens=100, new_tokens=4, timeout_s=120.0)
    first, *_ = VirtualScheduler(monkeypatch).replay([long, *short])
    assert first.first_token_s < max_first_token_s
