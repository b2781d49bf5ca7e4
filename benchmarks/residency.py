"""How much memory the replicas of a cluster on this machine hold."""

from __future__ import annotations

import psutil

# How Ray names the processes of Serve's replicas.
MARK = "ServeReplica:"


def replica_memory() -> dict[str, int]:
    """Resident bytes by process, such as `ServeReplica:hundredfold:Ingress 4711`."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            resident = process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if command and MARK in command[0]:
            name = command[0][command[0].index(MARK) :].split(".")[0]
            found[f"{name} {process.pid}"] = resident
    return found
