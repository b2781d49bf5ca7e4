from __future__ import annotations

import os
import signal
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.many_models import command
from benchmarks.many_models.command import (
    ManyModelsResults,
    build_config,
    build_tables,
    draw_zipf,
    evaluate_goals,
)
from benchmarks.many_models.store import GRAPH_NAME, VERSION, model_name, write_tiny_models
from benchmarks.servers.own_server import Server
from benchmarks.servers.process_kinds import ProcessKind
from benchmarks.serving.load import LoadResult
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from deployments.artifacts.types import Device
from deployments.config import AppArgs, EncoderSettings
from deployments.terminal.command_line import INTERRUPTED
from deployments.tuning.costs import TuningTarget
from deployments.tuning.opening import open_tuned_engine
from tests.support.fakes import FakeClock

RESULTS = ManyModelsResults(
    models=5_000,
    room=200,
    pool_bytes=300 << 20,
    start_s=20.0,
    start_few_s=19.0,
    requests_per_s=300.0,
    failures={},
    latency_ms={"p50": 10.0, "p99": 100.0},
    models_asked=3_000,
    hot_ms={"p50": 3.0},
    pinned_ms={"p50": 2.5},
    cold_bytes=23_000_000,
    cold_s=(0.4, 0.6, 0.7),
    encoder_mib=(400.0, 900.0),
)


def test_tiny_models_are_sealed_and_share_their_files(tmp_path: Path) -> None:
    write_tiny_models(tmp_path, 3)
    directories = [find_artifact(tmp_path, model_name(number)) for number in range(3)]
    manifests = [ArtifactManifest.read(directory) for directory in directories]
    assert [manifest.id for manifest in manifests] == [model_name(n) for n in range(3)]
    assert manifests[0].version == VERSION
    assert (directories[2] / GRAPH_NAME).stat().st_nlink == 3
    target = TuningTarget(directories[1], manifests[1], Device.CPU, EncoderSettings())
    open_tuned_engine(target).engine.close()


def test_zipf_prefers_few_models_and_draws_many() -> None:
    numbers = draw_zipf(np.random.default_rng(0), 1_000, 20_000)
    ((_, most),) = Counter(numbers.tolist()).most_common(1)
    assert most > 2_000
    assert len(set(numbers.tolist())) > 800


def test_config_has_two_encoders_and_no_generator(tmp_path: Path) -> None:
    config = build_config(tmp_path, 123)
    args = AppArgs.parse(config.arguments)
    assert args.encoders[Device.CPU].pool_bytes == 123
    assert list(args.encoders) == [Device.CPU]
    assert not args.generators
    names = [deployment["name"] for deployment in config.application["deployments"]]
    assert names == ["Ingress", "Tokenizer", "CpuEncoder"]


def test_tables_and_goals_have_the_measured_values() -> None:
    tables = build_tables(RESULTS)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert [goal.reached for goal in evaluate_goals(RESULTS)] == [True] * 4
    grown = replace(RESULTS, encoder_mib=(400.0, 1_001.0))
    assert [goal.reached for goal in evaluate_goals(grown)] == [True] * 3 + [False]


@dataclass
class ScriptedStarts:
    """Replaces the server. The first start is slow, as with a cold page cache."""

    models: list[str] = field(default_factory=list)  # which server started
    clock: FakeClock = field(default_factory=FakeClock)

    @contextmanager
    def start(self, config: Path, _logs: Path) -> Iterator[Server]:
        self.models.append(config.parent.name)
        self.clock.now_s += 60.0 if len(self.models) == 1 else 2.0
        yield Server(ServerAddress("127.0.0.1", 9), os.getpid())


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> ScriptedStarts:
    scripted = ScriptedStarts()

    def write_store(root: Path, _models: int, _arguments: Namespace) -> int:
        root.mkdir()
        return 1 << 30

    monkeypatch.setattr(command, "start_server", scripted.start)
    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=scripted.clock))
    monkeypatch.setattr(command, "write_store", write_store)
    monkeypatch.setattr(command, "count_cold_bytes", lambda _: 1)
    return scripted


def test_first_start_with_cold_caches_is_not_compared(
    starts: ScriptedStarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("requests_per_s", "failures", "latency_ms", "models_asked", "hot_ms", "pinned_ms",
             "cold_s", "encoder_mib")  # fmt: skip
    measured = {name: getattr(RESULTS, name) for name in names}
    monkeypatch.setattr(command, "measure", lambda *_: measured)
    assert main(["many-models", "--out", str(tmp_path)]) == 0
    assert starts.models == ["few", "few", "many"]
    (path,) = tmp_path.glob("many_models-*.json")
    assert orjson.loads(path.read_bytes())["results"]["start_few_s"] == 2.0


def test_traffic_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_no_load(*_: Any) -> LoadResult:
        return LoadResult(1, 1.0, np.array([]), {"not_connected": 7}, 0.0)

    monkeypatch.setattr(command, "run_load", run_no_load)
    server = Server(ServerAddress("127.0.0.1", 9), os.getpid())
    with pytest.raises(BenchmarkError, match=r"no request was answered: .*not_connected"):
        command.measure(server, Namespace(seed=0, models=10, seconds=0.1))


def test_memory_is_that_of_the_servers_own_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_processes(launcher: int, kind: ProcessKind) -> list[psutil.Process]:
        asked.append((launcher, kind.name))
        return [psutil.Process()]

    monkeypatch.setattr(command, "find_processes", find_processes)
    assert command.read_encoder_mib(4711) > 1
    assert asked == [(4711, "encoder")]


@pytest.mark.usefixtures("starts")
def test_sigterm_removes_the_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(*_: Any) -> None:
        assert list(tmp_path.glob("many-models-*"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "measure", measure)
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that a failure ends only the test
    try:
        assert main(["many-models", "--out", str(tmp_path)]) == INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert list(tmp_path.glob("many-models-*")) == []
