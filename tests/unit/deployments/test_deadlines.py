"""Deadlines of requests."""

import asyncio
import time

import pytest

from deployments.deadlines import deadline_after, enforce_deadline, is_expired, remaining_s
from deployments.errors import DeadlineExceeded


def test_deadline_after_is_monotonic_time() -> None:
    before_s = time.monotonic()
    deadline_s = deadline_after(5.0)
    assert before_s + 5.0 <= deadline_s <= time.monotonic() + 5.0
    left_s = remaining_s(deadline_s)
    assert deadline_s - time.monotonic() <= left_s <= 5.0


def test_is_expired_compares_with_now() -> None:
    assert is_expired(time.monotonic() - 1.0)
    assert not is_expired(deadline_after(60.0))


async def test_enforce_deadline_raises_deadline_exceeded() -> None:
    with pytest.raises(DeadlineExceeded, match="too late"):
        async with enforce_deadline(deadline_after(0.01), "too late"):
            await asyncio.sleep(60)


async def test_enforce_deadline_passes_other_timeouts_on() -> None:
    with pytest.raises(TimeoutError, match="inner"):
        async with enforce_deadline(deadline_after(60.0), "too late"):
            raise TimeoutError("inner")
