"""Priority of the engine threads, below that of the event loops that send them work."""

from __future__ import annotations

import os
import sys
import threading

# Nice value of engine threads. A request passes through eight threads. If all cores compute and all
# threads have equal priority, each of the eight waits for the end of an engine thread's time slice.
ENGINE_NICE = 5


def lower_priority() -> None:
    """Lower the priority of the current thread, and of threads that it starts, to ENGINE_NICE.

    A lower priority stays: a server that runs in the background keeps its place.
    """
    if sys.platform == "linux":  # other systems have one nice value for the whole process
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, ENGINE_NICE))
