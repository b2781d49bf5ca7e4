"""Priority of the engine threads, below that of the event loops that send them work."""

from __future__ import annotations

import os
import sys
import threading

# Nice value of engine threads. A request passes through eight threads. With equal priorities, each
# of them would wait for the end of a time slice while engine threads occupy all cores.
ENGINE_NICE = 5


def lower_thread_priority() -> None:
    """Lower the priority of the current thread, and of threads that it starts, to ENGINE_NICE.

    A priority that is already lower stays, such as that of a server started with `nice`.
    """
    if sys.platform == "linux":  # other systems have one nice value for the whole process
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, ENGINE_NICE))
