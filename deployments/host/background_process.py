"""Functions that a background process of the server, such as a build, calls at its start.

They lower its priority and limit its memory, so that requests stay fast. They also end the process
when its parent is gone.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PACKAGES = Path(__file__).parents[2]  # import path of background processes


def end_with_standard_input(before_exit: Callable[[], None] = lambda: None) -> None:
    """End this process as soon as its parent is gone, even if the parent was killed.

    Standard input must be a pipe from the parent. The pipe ends when the parent is gone.
    `before_exit` runs in a separate thread.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        try:
            before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()


def lower_process_priority() -> None:
    """Take the lowest priority for CPU, disk and memory."""
    os.nice(19)
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with suppress(OSError):  # on low memory the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def limit_memory(max_bytes: int) -> None:
    """Let allocations beyond `max_bytes` of private memory fail, in this process and each child."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:  # only root may raise it
        max_bytes = min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
