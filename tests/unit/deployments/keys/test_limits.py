from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from deployments.errors import RateLimited
from deployments.keys.key import MAX_LIMIT, KeyLimits
from deployments.keys.limits import KeyMeter, MeteredRequest, format_seconds
from tests.support.fakes import FakeClock


def count_admitted(
    limits: KeyLimits, replicas: int, minutes: int, tokens: Callable[[], int] = lambda: 0
) -> tuple[list[float], list[tuple[float, int]]]:
    """Let a key send 30 requests/s to random replicas, each in flight for 1 s.

    Return the times of the admitted requests, and (time, tokens) of each finished request.
    """
    clock, choice = FakeClock(), random.Random(7)
    meters = [KeyMeter("noisy", limits, clock) for _ in range(replicas)]
    admitted: list[float] = []
    used: list[tuple[float, int]] = []
    in_flight: deque[tuple[float, KeyMeter, MeteredRequest]] = deque()
    for tick in range(minutes * 60 * 30):
        clock.now_s = tick / 30
        while in_flight and in_flight[0][0] <= clock.now_s:
            _, meter, metered = in_flight.popleft()
            used.append((clock.now_s, tokens()))
            meter.use_tokens(used[-1][1])
            metered.release()
        meter = choice.choice(meters)
        try:
            metered = meter.enter(replicas)
        except RateLimited:
            continue
        admitted.append(clock.now_s)
        in_flight.append((clock.now_s + 1, meter, metered))
    return admitted, used


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("limit", [60, 600])
def test_noisy_key_gets_its_requests_and_no_more(limit: int, replicas: int) -> None:
    admitted, _ = count_admitted(KeyLimits(requests_per_minute=limit), replicas, minutes=2)
    # The burst at the start would hide a limit that is too low, so the second minute counts.
    assert 0.9 * limit <= sum(time_s >= 60 for time_s in admitted) <= 1.1 * limit
    for start in range(0, 61, 10):
        in_minute = sum(start <= time_s < start + 60 for time_s in admitted)
        assert in_minute <= 1.1 * limit + replicas


@pytest.mark.parametrize("replicas", [1, 2])
def test_noisy_key_gets_its_tokens_and_no_more(replicas: int) -> None:
    sizes = random.Random(3)
    limits = KeyLimits(tokens_per_minute=60_000)
    _, used = count_admitted(limits, replicas, 2, lambda: sizes.randint(50, 350))
    second_minute = sum(tokens for time_s, tokens in used if time_s >= 60)
    assert 0.9 * 60_000 <= second_minute <= 1.1 * 60_000
    assert sum(tokens for _, tokens in used) / 2 <= 1.1 * 60_000


def test_usage_without_a_limit_does_not_count_against_a_later_limit() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=1_000)
    meter = KeyMeter("alice", limits, FakeClock())
    meter.enter(1).release()
    meter.limits = KeyLimits(concurrent_requests=2)
    for _ in range(500):
        request = meter.enter(1)
        meter.use_tokens(100)
        request.release()
    meter.limits = limits
    meter.enter(1)


def test_concurrent_requests_are_bounded_and_freed() -> None:
    meter = KeyMeter("alice", KeyLimits(concurrent_requests=2), FakeClock())
    metered = [meter.enter(1), meter.enter(1)]
    with pytest.raises(RateLimited, match="2 requests at a time") as refused:
        meter.enter(1)
    assert refused.value.retry_after_s == 1
    metered.pop().release()
    meter.enter(1)
    with pytest.raises(RateLimited):
        meter.enter(1)


def test_small_limit_leaves_every_replica_one_request() -> None:
    limits = KeyLimits(concurrent_requests=1, requests_per_minute=1)
    for _ in range(3):
        KeyMeter("alice", limits, FakeClock()).enter(3)


def test_refused_request_uses_nothing() -> None:
    clock = FakeClock()
    meter = KeyMeter("alice", KeyLimits(requests_per_minute=10, concurrent_requests=1), clock)
    metered = meter.enter(1)
    for _ in range(5):
        with pytest.raises(RateLimited):
            meter.enter(1)
    metered.release()
    clock.now_s += 6
    meter.enter(1)


def test_large_request_is_paid_back() -> None:
    clock = FakeClock()
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=600), clock)
    metered = meter.enter(1)
    meter.use_tokens(660)
    metered.release()
    with pytest.raises(RateLimited, match="600 tokens per minute") as refused:
        meter.enter(1)
    clock.now_s += refused.value.retry_after_s
    meter.enter(1)


def test_expected_tokens_are_reserved_for_requests_in_flight() -> None:
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=600), FakeClock())
    metered = meter.enter(1)
    meter.use_tokens(50)
    metered.release()
    metered = meter.enter(1)
    with pytest.raises(RateLimited):  # 10 of 60 tokens are left, and each request may use 50
        meter.enter(1)
    metered.release()
    meter.enter(1)


def test_first_requests_reserve_tokens_before_any_usage_is_known() -> None:
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=600), FakeClock())
    requests = [meter.enter(1) for _ in range(32)]
    with pytest.raises(RateLimited, match="tokens"):
        meter.enter(1)
    for metered in requests:
        metered.release()
    meter.use_tokens(1)
    meter.enter(1)


def test_headers_give_limits_as_openai_does() -> None:
    meter = KeyMeter(
        "alice", KeyLimits(requests_per_minute=600, tokens_per_minute=6_000), FakeClock()
    )
    assert dict(meter.enter(1).headers) == {
        b"x-ratelimit-limit-requests": b"600",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"100ms",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"581",  # a share is reserved for this request
        b"x-ratelimit-reset-tokens": b"188ms",
    }


def test_every_refusal_names_all_limits() -> None:
    limits = KeyLimits(requests_per_minute=600, tokens_per_minute=6_000, concurrent_requests=1)
    meter = KeyMeter("alice", limits, FakeClock())
    lease = meter.enter(1)
    with pytest.raises(RateLimited, match="1 requests at a time") as refused:
        meter.enter(1)
    assert dict(refused.value.headers) == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "581",
        "x-ratelimit-reset-tokens": "188ms",
        "retry-after-ms": "1000",
    }
    meter.use_tokens(660)
    lease.release()
    with pytest.raises(RateLimited, match="6000 tokens per minute") as refused:
        meter.enter(1)
    assert refused.value.headers["x-ratelimit-limit-requests"] == "600"
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (360.0, "6m0s"),
        (419.7, "7m0s"),
    ],
)
def test_seconds_are_formatted_as_openai_does(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_limits_beyond_all_numbers_of_requests_are_clamped() -> None:
    limits = KeyLimits(requests_per_minute=10**400, tokens_per_minute=10**13)
    assert limits == KeyLimits(requests_per_minute=MAX_LIMIT, tokens_per_minute=MAX_LIMIT)
    KeyMeter("alice", limits, FakeClock()).enter(replicas=3).release()
