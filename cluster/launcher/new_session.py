"""A process session for the launcher and all processes of its server, without a terminal.

The scheduler of Linux gives each session an equal share of the cores (sched_autogroup_enabled,
man 7 sched). While HAProxy and Ray were in two sessions, HAProxy waited up to 0.26 s for a core
during overloads (docs/decisions/cluster.md). Only a process that leads no process group can
start a session, and a command of a shell leads its own group. The launcher then starts itself again
as a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType

from cluster.processes import end_with_parent


def leads_own_session() -> bool:
    """Return whether this process leads a session without a terminal, as a service does.

    A session with a terminal may contain processes that a shell has started.
    """
    if os.getsid(0) != os.getpid():
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return True
    return False


def run_in_new_session(signals: Iterable[signal.Signals]) -> int:
    """Run the command line of this process again in a new session. Return its exit code.

    Pass each of `signals` on to the new process, also one that arrives before it has started. If
    this process is killed, the kernel sends SIGTERM to the new process.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrived before `process` was set

    def forward(number: int, _frame: FrameType | None = None) -> None:
        if process is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for stop_signal in signals:
        signal.signal(stop_signal, forward)
    command = [*end_with_parent(signal.SIGTERM), sys.executable, *sys.orig_argv[1:]]
    process = subprocess.Popen(command, start_new_session=True)
    for number in early:
        forward(number)
    code = process.wait()
    return code if code >= 0 else 128 - code  # a shell reports signal N as 128 + N
