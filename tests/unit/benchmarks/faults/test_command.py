"""Watching a server after a fault."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from benchmarks.common.http import ServerAddress
from benchmarks.faults import command
from benchmarks.faults.command import watch
from benchmarks.faults.load import RIGHT, Observation, SteadyLoad
from benchmarks.servers.own_server import Server
from benchmarks.servers.process_kinds import KINDS

# Two live processes stand for a process that survives the fault and one that starts after it.
OLDER, NEW = psutil.Process(os.getppid()), psutil.Process()


@pytest.mark.parametrize(("found", "has_successor"), [([OLDER], False), ([OLDER, NEW], True)])
async def test_an_older_sibling_is_no_successor(
    monkeypatch: pytest.MonkeyPatch, found: list[psutil.Process], has_successor: bool
) -> None:
    monkeypatch.setattr(command, "find_processes", lambda *_: found)
    server = Server(ServerAddress("127.0.0.1", 9), os.getpid())
    load = SteadyLoad(server.address)
    now_s = time.perf_counter()
    load.observations.append(Observation("encoder", RIGHT, now_s, now_s))
    victim = psutil.Process(1)
    successor_s = await watch(server, KINDS[0], [OLDER, victim], load, seconds=0.01)
    assert (successor_s is not None) is has_successor
