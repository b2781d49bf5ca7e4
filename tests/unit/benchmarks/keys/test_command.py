from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.keys import command
from benchmarks.keys.command import (
    NOISY_PER_MINUTE,
    SETTLE_S,
    KeySet,
    LiveSettings,
    summarize_noisy,
)
from benchmarks.keys.results import KeysResults, build_tables, evaluate_goals
from benchmarks.servers.own_server import Server
from benchmarks.serving.load import LoadResult
from deployments.keys.key_file import read_key_file

MS = {"p50": 1.0, "p90": 2.0, "p99": 4.0}
RESULTS = KeysResults(
    refusal_ms={"no key": MS, "unknown key": MS},
    connections=64,
    without_keys=[100.0, 110.0, 90.0],
    with_keys=[98.0, 111.0, 88.0],
    noisy_allowed_per_s=20.0,
    noisy_answered_per_s=19.0,
    noisy_refused_per_s=400.0,
    noisy_failures={},
    quiet_alone_ms=MS,
    quiet_beside_ms=MS,
    quiet_failures={},
)


def test_cost_is_the_median_of_the_rounds() -> None:
    assert RESULTS.cost == pytest.approx(0.02)
    assert RESULTS.noisy_share == pytest.approx(0.95)


def test_tables_and_goals_have_the_measured_values() -> None:
    tables = build_tables(RESULTS)
    assert [table.name for table in tables] == ["refusals", "cost", "noisy"]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [goal.reached for goal in evaluate_goals(RESULTS)] == [True] * 4


def test_only_status_429_is_a_refusal() -> None:
    def load(**failures: int) -> LoadResult:
        return LoadResult(1, 10.0, np.full(20, 0.01), failures, cpu_s=0.1)

    noisy = load(**{"429": 40, "503": 2, "connection_lost": 1})
    summary = summarize_noisy(load(no_answer=1), load(no_answer=2), noisy)
    assert summary["noisy_refused_per_s"] == 40 / (10.0 + SETTLE_S)
    assert summary["noisy_failures"] == {"503": 2, "connection_lost": 1}
    assert summary["quiet_failures"] == {"no_answer": 3}
    results = replace(RESULTS, **summary)
    assert [goal.reached for goal in evaluate_goals(results)][-1] is False
    assert build_tables(results)[-1].rows[0][-1] == "3 / 3"


def test_interrupted_run_keeps_the_rounds_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> Iterator[KeysResults]:
        yield replace(RESULTS, without_keys=[100.0], with_keys=[98.0])
        raise KeyboardInterrupt

    @contextmanager
    def start_server(*_: object) -> Iterator[Server]:
        yield Server(ServerAddress("127.0.0.1", 8000), 1)

    monkeypatch.setattr(command, "start_server", start_server)
    monkeypatch.setattr(command, "LiveSettings", lambda *_: None)
    monkeypatch.setattr(command, "measure", measure)
    arguments = argparse.Namespace(
        command_line="bench keys", config=None, seed=0, out=tmp_path, json=False
    )
    with pytest.raises(KeyboardInterrupt):
        command.run(arguments)
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["run"]["incomplete"] == "KeyboardInterrupt()"
    assert written["results"]["with_keys"] == [98.0]


def test_key_set_has_a_limited_key(tmp_path: Path) -> None:
    keys = KeySet(tmp_path / "keys.json")
    by_name = {key.name: key for key in read_key_file(keys.path).keys}
    assert by_name["noisy"].limits.requests_per_minute == NOISY_PER_MINUTE
    assert by_name["usual"].limits.requests_per_minute is None


def test_log_without_a_dashboard_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "hundredfold.log"
    log.write_text("could not start")
    with pytest.raises(BenchmarkError, match="names no dashboard"):
        LiveSettings(log, tmp_path / "unused.yaml", 8000)
