"""Server processes on loopback: start, readiness, and end with all their descendants."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from cluster.process_session import ProcessSession, kill_remaining
from cluster.processes import start_session

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.2
_LOG_LINES = 3  # number of last lines of a log that messages quote


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command of a server. The server is ready when `GET ready_path` returns 200."""

    name: str
    arguments: Sequence[str]
    port: int
    ready_path: str
    # Environment variables in addition to those of this process. PYTHONPATH and VIRTUAL_ENV of this
    # process are left out.
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. `pid` is None for a server that the benchmark did not start."""

    address: ServerAddress
    pid: int | None = None

    def cpu_s(self) -> float | None:
        """Return the CPU time of the process and its descendants so far; None without a pid."""
        if self.pid is None:
            return None
        total_s = 0.0
        with suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    total_s += times.user + times.system
        return total_s


@contextmanager
def run_server(command: ServerCommand, logs: Path, directory: Path) -> Iterator[ServerProcess]:
    """Start a server and yield it when it is ready. End it and all its descendants afterwards.

    The log is `<logs>/<name>.log`. The server's working directory is `directory`, because some
    servers write files there. Raise BenchmarkError if the server does not start. If the block
    raises BenchmarkError and the server has ended, add the server's exit code to the message.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{command.name}.log"
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**inherited, **command.environment}
    process = start_session(list(command.arguments), environment, log, directory)
    session = ProcessSession.of(process.pid)
    try:
        wait_ready(command, process, log)
        yield ServerProcess(ServerAddress("127.0.0.1", command.port), process.pid)
    except BenchmarkError as exc:
        if (code := process.poll()) is None:
            raise
        reason = f"{exc.message}; its server has ended with exit code {code}"
        raise BenchmarkError(reason, hint=f"see {log}") from exc
    finally:
        stop(process, session)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does.

    The event loops of the load client cancel their tasks for SIGINT only. SIGHUP is the signal of
    a closed terminal.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers = {signal.SIGTERM: interrupt, signal.SIGHUP: interrupt}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    # Replace SIG_IGN, which a shell may set for SIGINT when it starts a background job.
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_ready(command: ServerCommand, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server is ready. Raise BenchmarkError if it ends, or after START_TIMEOUT_S."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_ready(command.port, command.ready_path):
        if process.poll() is not None:
            how = f"ended with exit code {process.returncode}"
        elif time.monotonic() > deadline_s:
            how = f"was not ready after {START_TIMEOUT_S:g} s"
        else:
            time.sleep(_POLL_S)
            continue
        lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        raise BenchmarkError(
            f"the server of {command.name} {how}: {' / '.join(lines)[-300:]}", hint=f"see {log}"
        )


def is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes], session: ProcessSession) -> None:
    """End a server with SIGTERM. After its end, or STOP_TIMEOUT_S, kill its remaining processes.

    The remaining processes are its descendants, even in other sessions, and the other members of
    `session`.
    """
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    for descendant in descendants:
        with suppress(psutil.Error):
            descendant.kill()  # psutil checks that no other process reuses the pid
    kill_remaining(session)
    psutil.wait_procs(descendants, timeout=STOP_TIMEOUT_S)
    process.wait()
