from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.overload import command
from benchmarks.overload.results import WorkloadResults


def test_interrupted_run_keeps_the_workloads_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: command.OverloadRun, _factors: object, _rounds: object) -> WorkloadResults:
        if run.workload.name.startswith("long"):
            raise KeyboardInterrupt
        return WorkloadResults(
            name=run.workload.name,
            timeout_s=1.0,
            capacities_per_s=(1.0,),
            memory_mib=(1.0,),
            levels=(),
        )

    monkeypatch.setattr(command, "find_launcher", lambda _address: 1)
    monkeypatch.setattr(command.OverloadRun, "measure", measure)
    arguments = argparse.Namespace(
        command_line="bench overload",
        url="http://127.0.0.1:8000",
        seed=0,
        workloads=("short", "long"),
        factors=(3.0,),
        rounds=1,
        out=tmp_path,
        json=False,
    )
    with pytest.raises(KeyboardInterrupt):
        command.run(arguments)
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["run"]["incomplete"] == "KeyboardInterrupt()"
    assert len(written["results"]["workloads"]) == 1
