"""Wait in a test without an event loop; `tests.support.fakes.wait_until` is for those with one."""

from __future__ import annotations

import time
from collections.abc import Callable

# Timeout in s, so that a failing test ends instead of hanging.
TIMEOUT_S = 30.0


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition` holds. Fail the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.01
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition was false for {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
