"""A process session, which identifies the processes of a run after their parents have ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessSession:
    """A process session, identified by its leader, the boot and the start of the leader.

    The session id alone is not enough, because the kernel reuses ids. The start is in ticks since
    the boot, because a time since the epoch would change when the system's clock is set.
    """

    sid: int
    boot_id: str  # the kernel's id of the boot; ticks of two boots are not comparable
    started_ticks: int  # clock ticks since the boot

    @classmethod
    def of(cls, leader_pid: int) -> ProcessSession:
        """Return the session of a leader. Raises OSError if the leader has ended."""
        return cls(leader_pid, _read_boot_id(), _read_started_ticks(leader_pid))

    def members(self) -> Iterator[psutil.Process]:
        """Yield the live members, except this process and its process group.

        Yield none if the session id now belongs to a later session.
        """
        if self.boot_id != _read_boot_id():
            return
        with contextlib.suppress(OSError):
            if _read_started_ticks(self.sid) != self.started_ticks:
                return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_own = os.getpgid(process.pid) == os.getpgid(0)
                is_member = os.getsid(process.pid) == self.sid and not is_own
                if is_member and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _read_started_ticks(pid: int) -> int:
    """Return the start of a process, field 22 of its status. Raises OSError if it has ended."""
    status = Path(f"/proc/{pid}/stat").read_bytes()
    # Field 2, the name in parentheses, may contain spaces and parentheses.
    return int(status.rpartition(b")")[2].split()[19])


def kill_remaining(session: ProcessSession) -> int:
    """Kill the members of `session`. Return the number of killed processes.

    Repeat until none remains or KILL_TIMEOUT_S have passed, because a supervisor may start
    processes before it is killed.
    """
    killed: set[int] = set()
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while remaining := list(session.members()):
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                process.kill()
        killed |= {process.pid for process in remaining}
        psutil.wait_procs(remaining, timeout=1)
        if time.monotonic() > deadline_s:
            break
    return len(killed)
