"""Detection of processes that exist but do not work: a hanging GCS or raylet, stopped processes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

# First bytes that an HTTP/2 client sends: the preface and an empty SETTINGS frame. A gRPC server
# answers with its own SETTINGS frame at once, without authentication, on a separate thread.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
ANSWER_S = 1.5
# Number of consecutive failed probes (3 to 4 s) after which Ray is restarted. Until then the server
# answers requests, but Ray replaces no process that ends.
MAX_SILENT_PROBES = 2
PERIOD_S = 0.5


def answers(port: int) -> bool:
    """Return whether the gRPC server at a port of this host answers within ANSWER_S."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
            connection.sendall(PREFACE)
            return bool(connection.recv(1))
    except OSError:
        return False


class Liveness:
    """Detector of gRPC servers that hang. `ports` maps the name of each server to its port."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = ports
        self._silent = dict.fromkeys(ports, 0)  # number of consecutive failed probes
        self._probed_s = 0.0  # reading of time.monotonic at the last probe

    def find_silent(self) -> str | None:
        """Return the name of a server that failed MAX_SILENT_PROBES consecutive probes, else None.

        Probe at most once per PERIOD_S.
        """
        if time.monotonic() - self._probed_s >= PERIOD_S:
            for name, port in self._ports.items():
                self._silent[name] = 0 if answers(port) else self._silent[name] + 1
            self._probed_s = time.monotonic()
        return next((n for n, count in self._silent.items() if count >= MAX_SILENT_PROBES), None)


class StoppedProcesses:
    """Killer of processes that a signal such as SIGSTOP has stopped, so that new ones replace them.

    Ray Serve needs 7 s to find a stopped replica, and never finds a stopped controller.
    """

    def __init__(self, find: Callable[[], Iterable[psutil.Process]]) -> None:
        self._find = find
        self._seen: dict[psutil.Process, int] = {}  # process -> number of context switches
        self._looked_s = 0.0  # reading of time.monotonic at the last check

    def kill(self) -> list[str]:
        """Kill processes that have been stopped ever since the last check. Return their names.

        Check at most once per PERIOD_S. Spare a process that ran since the last check: a tool that
        limits its CPU time may stop and continue it many times per second.
        """
        if time.monotonic() - self._looked_s < PERIOD_S:
            return []
        found: dict[psutil.Process, int] = {}
        killed = []
        for process in self._find():
            with suppress(psutil.Error):
                found[process] = count_context_switches(process.pid)
                if self._seen.get(process) == found[process]:
                    killed.append(process.name())
                    process.kill()
        self._seen = found
        self._looked_s = time.monotonic()
        return killed


def count_context_switches(pid: int) -> int:
    """Return the context switches of all threads of a process.

    They increase at each stop, even in an idle process. CPU times are too coarse: they have steps
    of 10 ms. The first thread alone may get no turn between two stops on a busy host.
    """
    counts = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            counts += re.findall(r"ctxt_switches:\s*(\d+)", status.read_text())
    return sum(map(int, counts))
