"""Limits of one key in one ingress replica: requests and tokens per minute, concurrent requests.

Every replica enforces its share: the limit divided by the number of running replicas. HAProxy
spreads the requests evenly, so a key can use its whole limit without calls between replicas. The
share of concurrent requests is rounded up, so the shares together may exceed the limit slightly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from deployments.errors import RateLimited
from deployments.keys.key import KeyLimits

# Capacity of a token bucket, in minutes of its limit, but at least one unit. A key can send at most
# 1.1 times its limit in any minute, if each replica's share is 10 requests or more per minute.
# For model tokens this holds only as far as the predicted tokens of the requests are right.
BURST_MINUTES = 0.1
CONCURRENCY_RETRY_S = 1.0
# Weight of the latest request in the moving average that predicts the tokens of the next one.
ESTIMATE_WEIGHT = 0.1
# Share of the capacity that a request reserves while no request has ended. So at most about
# 1 / FIRST_SHARE requests start before the tokens of one are known.
FIRST_SHARE = 1 / 32
# ASGI headers: pairs of name and value.
RawHeaders = list[tuple[bytes, bytes]]


class TokenBucket:
    """Token bucket of requests or of model tokens. `level` is the number of units free now.

    The level may be below zero, because a request may reserve or use more model tokens than are
    free.
    """

    __slots__ = ("header_names", "kind", "level", "per_minute", "updated_s")

    def __init__(self, kind: Literal["requests", "tokens"], now_s: float) -> None:
        self.kind = kind
        self.header_names = [
            f"x-ratelimit-{name}-{kind}".encode() for name in ("limit", "remaining", "reset")
        ]
        self.level = math.inf  # `refill` reduces it to the capacity
        self.per_minute = math.inf  # this replica's share of the limit
        self.updated_s = now_s

    @property
    def capacity(self) -> float:
        return max(1.0, self.per_minute * BURST_MINUTES)

    def refill(self, per_minute: float, now_s: float) -> None:
        earned = (now_s - self.updated_s) * per_minute / 60
        self.per_minute, self.updated_s = per_minute, now_s
        self.level = min(self.capacity, self.level + earned)

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.per_minute


class KeyMeter:
    """Usage of a key in this replica. Not thread-safe."""

    def __init__(
        self, name: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.limits = limits  # replaced when the key file changes
        self._clock = clock
        self._in_flight = 0
        self._requests = TokenBucket("requests", clock())
        self._tokens = TokenBucket("tokens", clock())
        self._average_tokens: float | None = None  # moving average per request that has ended

    def enter(self, replicas: int) -> MeteredRequest:
        """Count a request at its start. Raises RateLimited if the key has reached a limit.

        Each of the `replicas` of the ingress admits an equal share of the limits.
        """
        now_s = self._clock()
        limited = []
        for bucket, limit in (
            (self._requests, self.limits.requests_per_minute),
            (self._tokens, self.limits.tokens_per_minute),
        ):
            if limit is None:
                bucket.level = math.inf  # this use must not count against a limit that is set later
            else:
                bucket.refill(limit / replicas, now_s)
                limited.append((bucket, limit))
        error = self._find_exceeded(limited, replicas)
        if error is not None:
            known = {
                name.decode(): value.decode() for name, value in build_headers(limited, replicas)
            }
            error.headers = {**known, **error.headers}
            raise error
        self._requests.level -= 1
        # Reserve the expected tokens, so that concurrent requests cannot use them too.
        expected = self._expect_tokens()
        self._tokens.level -= expected
        self._in_flight += 1
        return MeteredRequest(self, expected, build_headers(limited, replicas))

    def _expect_tokens(self) -> float:
        if self._average_tokens is not None:
            return self._average_tokens
        has_limit = self.limits.tokens_per_minute is not None
        return FIRST_SHARE * self._tokens.capacity if has_limit else 0.0

    def use_tokens(self, tokens: int) -> None:
        """Count the tokens of a request that has ended, and update the expected tokens."""
        self._tokens.level -= tokens
        former = self._average_tokens or tokens
        self._average_tokens = former + ESTIMATE_WEIGHT * (tokens - former)

    def leave(self, expected_tokens: float) -> None:
        self._tokens.level += expected_tokens
        self._in_flight -= 1

    def _find_exceeded(
        self, limited: Sequence[tuple[TokenBucket, int]], replicas: int
    ) -> RateLimited | None:
        """Build the error for the limit that a new request would exceed, or return None.

        `limited` has each bucket with a limit, and this limit for the whole cluster.
        """
        concurrent = self.limits.concurrent_requests
        if concurrent is not None and self._in_flight >= math.ceil(concurrent / replicas):
            return build_rate_limited(
                f"the key `{self.name}` may have {concurrent} requests at a time. Send this one "
                "when another is answered.",
                wait_s=CONCURRENCY_RETRY_S,
            )
        exceeded = (self._exceeded(bucket, limit) for bucket, limit in limited if bucket.level < 1)
        return next(exceeded, None)

    def _exceeded(self, bucket: TokenBucket, limit: int) -> RateLimited:
        wait_s = bucket.seconds_until(1)
        return build_rate_limited(
            f"the key `{self.name}` may use {limit} {bucket.kind} per minute. Retry in "
            f"{wait_s:.1f} s.",
            wait_s=wait_s,
            headers={
                f"x-ratelimit-limit-{bucket.kind}": str(limit),
                f"x-ratelimit-remaining-{bucket.kind}": "0",
                f"x-ratelimit-reset-{bucket.kind}": format_seconds(wait_s),
                # huggingface_hub shows these two headers to its user.
                "ratelimit": f'"{bucket.kind}";r=0;t={math.ceil(wait_s)}',
                "ratelimit-policy": f'"token bucket";"{bucket.kind}";q={limit};w=60',
            },
        )


class MeteredRequest:
    """A request in flight, with the rate limit `headers` for its response."""

    __slots__ = ("_expected_tokens", "_meter", "headers")

    def __init__(self, meter: KeyMeter, expected_tokens: float, headers: RawHeaders) -> None:
        self._meter = meter
        self._expected_tokens = expected_tokens
        self.headers = headers

    def release(self) -> None:
        """Stop counting the request as in flight, and free its reserved tokens.

        The caller calls this once, when the response is sent.
        """
        self._meter.leave(self._expected_tokens)


def build_headers(limited: Sequence[tuple[TokenBucket, int]], replicas: int) -> RawHeaders:
    """Build the headers that OpenAI's clients read, as this replica's estimate for the cluster."""
    headers: RawHeaders = []
    for bucket, limit in limited:
        limit_name, remaining_name, reset_name = bucket.header_names
        remaining = max(0, int(bucket.level * replicas))
        reset = format_seconds(bucket.seconds_until(bucket.capacity))
        headers += (
            (limit_name, b"%d" % limit),
            (remaining_name, b"%d" % remaining),
            (reset_name, reset.encode()),
        )
    return headers


def build_rate_limited(
    message: str, *, wait_s: float, headers: Mapping[str, str] = MappingProxyType({})
) -> RateLimited:
    error = RateLimited(message)
    error.retry_after_s = math.ceil(wait_s)
    # OpenAI's clients prefer milliseconds.
    error.headers = {**headers, "retry-after-ms": str(math.ceil(wait_s * 1e3))}
    return error


def format_seconds(seconds: float) -> str:
    """Format a duration as OpenAI does: `20ms`, `1.5s`, `6m0s`."""
    if (milliseconds := math.ceil(seconds * 1e3)) < 1_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{seconds:.3g}s"
