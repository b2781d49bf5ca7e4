"""The clock of an event loop, moved ahead by a test instead of waiting."""

from __future__ import annotations

import asyncio

import pytest


class LoopClock:
    """The clock of the running event loop, which the test moves ahead."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        time, self._ahead_s = loop.time, 0.0
        patch.setattr(loop, "time", lambda: time() + self._ahead_s)

    async def advance(self, seconds: float) -> None:
        """Move the clock, then run the timers that are due."""
        self._ahead_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)
