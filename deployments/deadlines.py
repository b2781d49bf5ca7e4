"""Deadlines of requests: seconds of the wall clock (`time.time`), because they cross processes.

The ingress sets the deadline of a call once. Every later hop compares it with its own clock.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from deployments.errors import DeadlineExceeded


def deadline_after(timeout_s: float) -> float:
    return time.time() + timeout_s


def remaining_s(deadline_s: float) -> float:
    """Return the seconds until the deadline; negative after it."""
    return deadline_s - time.time()


def is_expired(deadline_s: float) -> bool:
    return time.time() > deadline_s


class enforce_deadline:
    """Cancel the block at the deadline and raise DeadlineExceeded with `message`.

    A class, because every request passes several: a generator costs three times as much.
    """

    __slots__ = ("_message", "_timeout")

    def __init__(self, deadline_s: float, message: str) -> None:
        self._timeout = asyncio.timeout(remaining_s(deadline_s))
        self._message = message

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as exc:
            raise DeadlineExceeded(self._message) from exc
