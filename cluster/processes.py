"""The processes of one run of the server, found by their process session.

The launcher leads a session (cluster/launcher/new_session.py). All processes that it or Ray starts
stay in this session, and keep the session id when their parents end. Command lines and environments
do not identify processes, because Ray's processes overwrite both with their titles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from cluster.process_session import ProcessSession, kill_remaining
from cluster.progress import POLL_S
from cluster.start_errors import StartError, file_errors
from deployments.claimed_directory import claim_directory
from deployments.files import write_atomically

SESSION_NAME = "session.json"
SERVE_STOP_S = 5.0  # default time for Serve to finish requests and end, after Ctrl-C
RAY_STOP_S = 8.0  # time for Ray to end after SIGTERM
STOP_POLL_S = 0.1
CONTROLLER_NAME = "ray::ServeContr"  # Serve's controller; the kernel keeps 15 characters
# Maximum bytes of the path of a run's private directory. The path of a socket has at most 107, and
# Ray Serve adds 68: a slash, the id of the node with 56 characters, and `/admin.sock`.
MAX_PRIVATE_PATH = 107 - 68
MAX_PRIVATE_NAMES = 10  # number of names that a run tries for its private directory
HAPROXY_SPECIAL = frozenset(" \t\n#\"'\\")  # Ray Serve writes paths for HAProxy without quotes
TAIL_LINES = 5  # number of last log lines to show of a child that has ended


def kill_previous_run(run_dir: Path) -> int:
    """Kill the remaining processes of a run whose launcher was killed. Return their number."""
    session = load_session(run_dir / SESSION_NAME)
    return 0 if session is None else kill_remaining(session)


@contextmanager
def private_directory(run_dir: Path) -> Iterator[Path]:
    """Create an empty, private directory for the sockets of a run. Remove it afterwards.

    The directory is in the temporary directory, or in /tmp if that path is too long for a socket or
    cannot be in a configuration of HAProxy. Raises StartError if it cannot be created.
    """
    path, lock = _claim_private_directory(run_dir)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _claim_private_directory(run_dir: Path) -> tuple[Path, int]:
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
    name = f"hundredfold-{os.getuid()}-{digest}"
    # Containers that share the temporary directory choose the same name if their run directories
    # have the same path.
    names = [name, *(f"{name}-{number}" for number in range(1, MAX_PRIVATE_NAMES))]
    root = Path(tempfile.gettempdir())
    is_long = len(os.fsencode(root / names[-1])) > MAX_PRIVATE_PATH
    if is_long or HAPROXY_SPECIAL.intersection(str(root)):
        root = Path("/tmp")
    with file_errors(root):
        for path in (root / each for each in names):
            lock = claim_directory(path)
            if lock is not None:
                return path, lock
    raise StartError(
        f"other processes use `{root / name}` and {MAX_PRIVATE_NAMES - 1} more directories like it",
        hint="set `TMPDIR` to a directory of this server",
    )


class ChildProcesses:
    """`ray start` and `serve run` with their descendants, with logs in the run directory.

    This process must lead a session without other programs. Processes in the process group of this
    process, such as HAProxy, do not count as children: a restart of Ray spares them.
    """

    def __init__(self, run_dir: Path) -> None:
        assert os.getsid(0) == os.getpid(), "bug: the launcher leads no session"
        self.run_dir = run_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._session = ProcessSession.of(os.getpid())
        self._session_file = run_dir / SESSION_NAME
        with file_errors(run_dir):
            save_session(self._session_file, self._session)

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        directory: Path | None = None,
    ) -> int:
        """Start a child and return its id. The kernel ends the child if this process is killed.

        Its working directory is `directory`; None: the directory of this process. Raises StartError
        if the child, or a run directory that was removed, cannot be created.
        """
        with file_errors(self.run_dir):
            self.run_dir.mkdir(exist_ok=True)
            if not self._session_file.exists():
                save_session(self._session_file, self._session)
            log = self._find_log(name)
            self._processes[name] = _start(
                command, environment, log, cwd=directory, process_group=0
            )
        return self._processes[name].pid

    def _find_log(self, name: str) -> Path:
        return self.run_dir / f"{name}.log"

    def names(self) -> set[str]:
        """Return the names of all live processes of the children."""
        names = set()
        for process in self._session.members():
            with suppress(psutil.Error):
                names.add(process.name())
        return names

    def find_stopped(self) -> Iterator[psutil.Process]:
        """Yield the processes of the children that a signal has stopped."""
        for process in self._session.members():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    yield process

    def find_ended(self) -> dict[str, int]:
        """Return the exit codes of the children that have ended, in the order of their starts."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def failure(self) -> str | None:
        """Describe a child that has ended; None while all children run."""
        for name, code in self.find_ended().items():
            log = self._find_log(name)
            ended = f"`{name}` {_describe_end(code)}"
            try:
                lines = log.read_text(errors="replace").strip().splitlines()
            except OSError as exc:
                return f"{ended}; {log} cannot be read: {exc.strerror}"
            return "\n".join([f"{ended}; {log} ends:", *lines[-TAIL_LINES:]])
        return None

    def wait(self, is_ray_silent: Callable[[], bool]) -> None:
        """Wait until a child has ended. Kill Ray if `is_ray_silent` returns True."""
        while not self.find_ended():
            if is_ray_silent():
                self._processes["ray"].kill()
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill all processes of the children and forget them before a restart."""
        kill_remaining(self._session)
        self._processes.clear()

    def stop(
        self, serve_stop_s: float = SERVE_STOP_S, is_urgent: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Stop Serve, which finishes running requests. Then stop Ray and all remaining processes.

        Requests that run for longer than `serve_stop_s` are cut. Once `is_urgent` returns True, all
        that still runs is killed. Return the names of processes that are still alive.
        """
        # Serve has stopped once its controller has ended. `serve run` does not notice this end,
        # because Ray repeats the last call of `serve run` to the controller forever.
        self._end(
            "serve",
            signal.SIGINT,
            serve_stop_s,
            lambda: is_urgent() or not self._has_controller(),
        )
        self._end("ray", signal.SIGTERM, RAY_STOP_S, is_urgent)
        kill_remaining(self._session)
        remaining = sorted(self.names())
        if not remaining:
            with suppress(OSError):  # the next start ignores the file of an ended session
                self._session_file.unlink()
        return remaining

    def _has_controller(self) -> bool:
        return any(name.startswith(CONTROLLER_NAME) for name in self.names())

    def _end(
        self,
        name: str,
        number: signal.Signals,
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send a signal to a child. Wait until the child ends or `is_over`, at most `timeout_s`."""
        process = self._processes.get(name)
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        deadline_s = time.monotonic() + timeout_s
        while process.poll() is None and not is_over() and time.monotonic() < deadline_s:
            time.sleep(STOP_POLL_S)


def _describe_end(code: int) -> str:
    """Describe the exit code of a child; Popen reports signal N as -N."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code) or 'unknown'})"


def start_session(
    command: list[str], environment: dict[str, str], log: Path, directory: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a new session. Its output goes to `log`; a former log becomes `<log>.1`.

    Its working directory is `directory`; None: the directory of this process. The kernel sends the
    new process SIGTERM when this process ends.
    """
    return _start(command, environment, log, cwd=directory, start_new_session=True)


def _start(
    command: list[str], environment: dict[str, str], log: Path, **options: Any
) -> subprocess.Popen[bytes]:
    # Keep the former log, because it shows why the previous process ended.
    with suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("wb") as output:
        return subprocess.Popen(
            [*end_with_parent(signal.SIGTERM), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **options,
        )


def end_with_parent(number: signal.Signals) -> list[str]:
    """Return arguments to put before a command, so that it gets a signal when its parent ends.

    The kernel sends the signal. Return no arguments without setpriv of util-linux 2.33 or later.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None or not _has_parent_signal(setpriv):
        return []
    return [setpriv, "--pdeathsig", number.name.removeprefix("SIG")]


@cache
def _has_parent_signal(setpriv: str) -> bool:
    """Return whether `setpriv` knows --pdeathsig. Older ones, and that of BusyBox, do not."""
    command = [setpriv, "--pdeathsig", "TERM", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def save_session(path: Path, session: ProcessSession) -> None:
    """Write the session of a run, which `kill_previous_run` reads at the next start."""
    content = {**asdict(session), "directory": _identify(path.parent)}
    write_atomically(path, json.dumps(content).encode())


def load_session(path: Path) -> ProcessSession | None:
    """Read the session of the previous run; None if the file is missing, invalid or a copy.

    The processes in a copy belong to the run directory that was copied, whose server may still run.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        directory = _identify(path.parent)
        is_copy = content.pop("directory", directory) != directory  # earlier versions write none
        return None if is_copy else ProcessSession(**content)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _identify(directory: Path) -> list[int]:
    """Return the device and inode of a directory, which no copy of it has."""
    state = directory.stat()
    return [state.st_dev, state.st_ino]
