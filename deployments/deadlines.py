"""Deadlines of requests: seconds of this process's monotonic clock.

The ingress sets the deadline of a call once. Messages between processes carry the remaining time,
because the clocks of processes differ. Channels send the remaining time in frames. For calls
through Ray Serve handles, `to_remaining` computes the remaining time from the deadlines.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from deployments.errors import DeadlineExceeded


def deadline_after(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def remaining_s(deadline_s: float) -> float:
    """Return the seconds until the deadline; negative after it."""
    return deadline_s - time.monotonic()


def is_expired(deadline_s: float) -> bool:
    return time.monotonic() > deadline_s


class enforce_deadline:
    """Context manager that cancels its block at the deadline and raises DeadlineExceeded.

    This is a class because every request enters several such blocks, and a generator function with
    `asynccontextmanager` would take three times as long.
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
            del self._timeout  # it refers to the task, which refers to this frame by its traceback
            raise DeadlineExceeded(self._message) from exc
