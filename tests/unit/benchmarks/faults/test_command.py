"""Watching a server after a fault, and results of a run that ends early."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.faults import command
from benchmarks.faults.command import FaultPlan, cause_fault, read_former, watch
from benchmarks.faults.load import RIGHT, Observation, SteadyLoad
from benchmarks.faults.results import summarize_fault
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
    successor_s = await watch(server, KINDS["encoder"], [OLDER, victim], load, seconds=0.01)
    assert (successor_s is not None) is has_successor


async def test_missing_victim_is_an_error_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_processes", lambda *_: [])
    monkeypatch.setattr(command, "LEAD_S", 0.0)
    plan = FaultPlan(encoders=[], generators=[], encoder_rate=1, generator_rate=1, seconds=0.0)
    server = Server(ServerAddress("127.0.0.1", 9), os.getpid())
    with pytest.raises(BenchmarkError, match="no process of the kind encoder runs"):
        await cause_fault(server, KINDS["encoder"], "kill", plan)


def test_faults_before_the_end_of_a_server_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    observations = [Observation("encoder", RIGHT, 1.0, 1.1)]

    async def cause_faults(*given: Any) -> None:
        given[-1].append(summarize_fault(KINDS["encoder"], "kill", observations, 1.0, 0.5))
        raise BenchmarkError("the server has not recovered after 60 s")

    monkeypatch.setattr(command, "cause_faults", cause_faults)
    server = Server(ServerAddress("127.0.0.1", 9), os.getpid())
    monkeypatch.setattr(command, "start_server", lambda *_: nullcontext(server))
    assert main(["faults", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("faults-*.json")
    assert "not recovered" in orjson.loads(path.read_bytes())["run"]["incomplete"]
    assert [(one.kind, one.action) for one in read_former(path)] == [("encoder", "kill")]
