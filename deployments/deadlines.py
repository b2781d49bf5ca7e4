"""Deadlines of requests: seconds of the wall clock (`time.time`), because they cross processes.

The ingress sets the deadline of a call once. Every later hop compares it with its own clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import DeadlineExceeded


def deadline_after(timeout_s: float) -> float:
    return time.time() + timeout_s


def remaining_s(deadline_s: float) -> float:
    """Return the seconds until the deadline; negative after it."""
    return deadline_s - time.time()


def is_expired(deadline_s: float) -> bool:
    return time.time() > deadline_s


@asynccontextmanager
async def enforce_deadline(deadline_s: float, message: str) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body at the deadline and raise DeadlineExceeded with `message`."""
    try:
        async with asyncio.timeout(remaining_s(deadline_s)) as timeout:
            yield timeout
    except TimeoutError as exc:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(message) from exc
