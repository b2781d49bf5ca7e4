"""Processes that live and do not work: GCS or a raylet that hangs, any process that is stopped."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import psutil

# The first bytes of an HTTP/2 client, with an empty SETTINGS frame. Each gRPC server sends its own
# at once, without authentication, on a thread of its own.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
ANSWER_S = 1.5
# Probes in a row without an answer, after which all of Ray starts again: 3 to 4 s. Requests are
# served meanwhile, but nothing that ends is replaced.
MAX_SILENT_PROBES = 2
PERIOD_S = 0.5


def answers(port: int) -> bool:
    """Whether the gRPC server at a port of this host answers within ANSWER_S."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
            connection.sendall(PREFACE)
            return bool(connection.recv(1))
    except OSError:
        return False


class Liveness:
    """Probes servers, given as port by name."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = ports
        self._silent = dict.fromkeys(ports, 0)  # probes in a row without an answer
        self._probed_s = 0.0  # time.monotonic

    def find_silent(self) -> str | None:
        """Return the name of a server that does not answer. Probes at most every PERIOD_S."""
        if time.monotonic() - self._probed_s >= PERIOD_S:
            for name, port in self._ports.items():
                self._silent[name] = 0 if answers(port) else self._silent[name] + 1
            self._probed_s = time.monotonic()
        return next((n for n, count in self._silent.items() if count >= MAX_SILENT_PROBES), None)


class StoppedProcesses:
    """Kills processes that a signal has stopped, so that they are replaced as if they had ended.

    Ray Serve needs 7 s to find a stopped replica, and never finds a stopped controller.
    """

    def __init__(self, find: Callable[[], Iterable[psutil.Process]]) -> None:
        self._find = find
        self._seen: dict[psutil.Process, int] = {}  # and how often it gave the CPU back
        self._looked_s = 0.0  # time.monotonic

    def kill(self) -> list[str]:
        """Kill those that stood still since the last look; return their names.

        Looks every PERIOD_S. One that ran in between is spared: tools that limit the CPU time of a
        process stop it and let it go on in turn.
        """
        if time.monotonic() - self._looked_s < PERIOD_S:
            return []
        found: dict[psutil.Process, int] = {}
        killed = []
        for process in self._find():
            with suppress(psutil.Error):
                # Counted at each stop, even of an idle process; CPU times move in steps of 10 ms.
                found[process] = sum(process.num_ctx_switches())
                if self._seen.get(process) == found[process]:
                    killed.append(process.name())
                    process.kill()
        self._seen = found
        self._looked_s = time.monotonic()
        return killed
