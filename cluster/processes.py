"""Processes and ports of one run, found by the session they belong to.

Each child of the launcher leads a session of its own, and whatever Ray starts, HAProxy included,
stays in it. The kernel keeps that number even when parents die; command lines and environments
would not do, because Ray's processes write their titles over both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

SESSIONS_NAME = "sessions.json"
SERVE_STOP_S = 5.0  # seconds in-flight requests get after Ctrl-C
RAY_STOP_S = 8.0


def kill_previous_run(run_dir: Path) -> int:
    """End what a run that was killed has left; how many processes that were."""
    return kill_remaining(load_sessions(run_dir / SESSIONS_NAME))


class ChildProcesses:
    """`ray start` and `serve run`, each in a session of its own, output in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: list[ProcessSession] = []

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        """Start a child; the kernel ends it should this process be killed."""
        setpriv = shutil.which("setpriv")
        leash = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
        with (self.run_dir / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*leash, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        self._sessions.append(ProcessSession.of(process.pid))
        save_sessions(self.run_dir / SESSIONS_NAME, self._sessions)

    def names(self) -> set[str]:
        """Names of every live process of the run."""
        found = set()
        for process in (p for session in self._sessions for p in session.members()):
            with suppress(psutil.Error):
                found.add(process.name())
        return found

    def failure(self) -> str | None:
        """Which child has ended, and how; None while all run."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                log = self.run_dir / f"{name}.log"
                tail = log.read_text(errors="replace").strip().splitlines()[-5:]
                return "\n".join([f"`{name}` ended with exit code {code}; {log} ends:", *tail])
        return None

    def wait(self) -> None:
        """Return when a child has ended."""
        while self.failure() is None:
            time.sleep(0.5)

    def stop(self) -> list[str]:
        """Serve first, so that requests under way finish; then Ray; then whatever is left.

        Returns the names of processes that could not be ended.
        """
        self._end("serve", signal.SIGINT, SERVE_STOP_S)
        self._end("ray", signal.SIGTERM, RAY_STOP_S)
        kill_remaining(self._sessions)
        left = sorted(self.names())
        if not left:
            (self.run_dir / SESSIONS_NAME).unlink(missing_ok=True)
        return left

    def _end(self, name: str, number: signal.Signals, timeout_s: float) -> None:
        process = self._processes.get(name)
        if process is None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(number)
            process.wait(timeout_s)


# Two readings of one process's start differ by less than this (seconds).
CLOCK_SLACK_S = 0.1


@dataclass(frozen=True, slots=True)
class ProcessSession:
    """A session by its leader, whose start time tells it from a later one of the same number."""

    sid: int
    started_s: float  # seconds since the epoch

    @classmethod
    def of(cls, leader_pid: int) -> ProcessSession:
        """The session led by a live process."""
        return cls(leader_pid, psutil.Process(leader_pid).create_time())

    def members(self) -> Iterator[psutil.Process]:
        """Live members; none if the number has passed to somebody else's session."""
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.sid)
            if abs(leader.create_time() - self.started_s) > CLOCK_SLACK_S:
                return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) == self.sid
                after = process.create_time() >= self.started_s - CLOCK_SLACK_S
                if ours and after and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def kill_remaining(sessions: Iterable[ProcessSession], *, timeout_s: float = 10.0) -> int:
    """Kill what is left of `sessions`; the number of processes that had to be killed.

    Loops, because a supervisor that dies last may have started something meanwhile.
    """
    killed: set[int] = set()
    give_up_s = time.monotonic() + timeout_s
    sessions = tuple(sessions)
    while left := [process for session in sessions for process in session.members()]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        killed |= {process.pid for process in left}
        psutil.wait_procs(left, timeout=1)
        if time.monotonic() > give_up_s:
            break
    return len(killed)


def save_sessions(path: Path, sessions: Iterable[ProcessSession]) -> None:
    """Write the sessions of a run where the next start finds them."""
    path.write_text(json.dumps([asdict(session) for session in sessions]), encoding="utf-8")


def load_sessions(path: Path) -> list[ProcessSession]:
    """The sessions of the run before; none when it left no readable note."""
    try:
        return [ProcessSession(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def port_is_free(host: str, port: int) -> bool:
    """Whether nobody listens on `host`:`port`.

    Raises OSError when this process may not listen there in any case.
    """
    with socket.socket() as probe:
        # As HAProxy does: connections in TIME_WAIT do not count as somebody else.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_port(preferred: int, reserved: int) -> int:
    """`preferred` if nobody listens there and it is not `reserved`, else the kernel's choice."""
    if preferred != reserved and port_is_free("0.0.0.0", preferred):
        return preferred
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port: int = probe.getsockname()[1]
        return port


def port_owner(port: int) -> str:
    """Who listens on `port`, in words; root sees every owner, others their own processes."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            at_port = getattr(connection.laddr, "port", None) == port
            if at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({process.name()})"
    return "another process"
