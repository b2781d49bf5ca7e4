"""The two processes of a run, and how they end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.processes import Session, recall, remember, sweep

SESSIONS_NAME = "sessions.json"
SERVE_STOP_S = 5.0  # seconds in-flight requests get after Ctrl-C
RAY_STOP_S = 8.0


def sweep_former_run(run_dir: Path) -> int:
    """End what a run that was killed has left; how many processes that were."""
    return sweep(recall(run_dir / SESSIONS_NAME))


class Children:
    """`ray start` and `serve run`, each in a session of its own, output in the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: list[Session] = []

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
        self._sessions.append(Session.of(process.pid))
        remember(self.run_dir / SESSIONS_NAME, self._sessions)

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
        sweep(self._sessions)
        left = sorted(self.names())
        if not left:
            (self.run_dir / SESSIONS_NAME).unlink(missing_ok=True)
        return left

    def _end(self, name: str, number: signal.Signals, patience_s: float) -> None:
        process = self._processes.get(name)
        if process is None:
            return
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(number)
            process.wait(patience_s)
