"""Priority of threads that compute, below that of the event loops that feed them."""

from __future__ import annotations

import os
import sys
import threading

# Nice value of engine threads. A request passes eight threads; with equal priorities each of them
# waits for a time slice of an engine thread while all cores compute.
ENGINE_NICE = 5


def lower_priority() -> None:
    """Let the event loops of this host go first. Threads that the current one starts inherit it."""
    if sys.platform == "linux":  # elsewhere a nice value belongs to the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENGINE_NICE)
