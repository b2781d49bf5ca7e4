"""Kinds of server processes, and the search for processes of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from cluster.process_session import ProcessSession

ProcessFault = Literal["kill", "stop"]
ACTION_NAMES = {"kill": "kill -9", "stop": "SIGSTOP"}


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """Processes whose command line contains `words`, and the allowed effect of their loss.

    At most 0.1 % of the requests may fail. If `max_disturbed_s` is not None, more requests may fail
    or be slow, but only for this number of seconds after the fault.
    """

    name: str
    words: str
    max_disturbed_s: float | None = None


REPLICA = "ray::ServeReplica:hundredfold:"
# Values of `max_disturbed_s`.
PORT_S = 2.0  # after a loss of HAProxy or its manager, which serve the port for clients
RESTART_S = 20.0  # after a loss that makes Ray or Serve restart
_ALL_KINDS = (
    ProcessKind("encoder", f"{REPLICA}CpuEncoder"),
    ProcessKind("tokenizer", f"{REPLICA}Tokenizer"),
    ProcessKind("generator", f"{REPLICA}CpuGenerator"),
    ProcessKind("ingress", f"{REPLICA}Ingress"),
    ProcessKind("controller", "ray::ServeController"),
    ProcessKind("haproxy", "/haproxy -db", PORT_S),
    ProcessKind("manager", "ray::HAProxyManager", PORT_S),
    ProcessKind("gcs", "gcs/gcs_server", RESTART_S),
    ProcessKind("raylet", "raylet/raylet", RESTART_S),
    ProcessKind("dashboard", "dashboard/dashboard.py"),
)
KINDS: Mapping[str, ProcessKind] = {kind.name: kind for kind in _ALL_KINDS}


def find_processes(launcher: int, kind: ProcessKind) -> list[psutil.Process]:
    """Return the live processes of a kind in the launcher's session, the oldest first."""
    found = [one for one in find_members(launcher) if kind.words in read_command(one)]
    return sorted(found, key=psutil.Process.create_time)


def read_private_bytes(processes: Iterable[psutil.Process]) -> dict[psutil.Process, int]:
    """Return the private memory of each process that still runs: pages that no other has."""
    sizes = {}
    for process in processes:
        with suppress(psutil.Error):
            sizes[process] = process.memory_full_info().uss
    return sizes


def find_members(launcher: int) -> Iterator[psutil.Process]:
    """Yield the live processes of the session that the launcher leads, except the launcher.

    Yield none if the launcher has ended.
    """
    try:
        session = ProcessSession.of(launcher)
    except OSError:
        return
    yield from (process for process in session.members() if process.pid != launcher)


def read_command(process: psutil.Process) -> str:
    """Return the command line; empty when the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
