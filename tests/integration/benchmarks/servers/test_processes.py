from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.servers import processes
from benchmarks.servers.processes import ServerCommand, is_ready, run_server
from benchmarks.serving.load import LoadPlan, Workload, run_load
from tests.support.ports import free_port

SCRIPT = Path(__file__).parents[3] / "support" / "toy_rival.py"


def toy_command(*options: str) -> ServerCommand:
    port = free_port()
    arguments = [sys.executable, str(SCRIPT), "--port", str(port), *options]
    return ServerCommand("toy", arguments, port, "/health", {})


def test_run_server_yields_a_ready_server_and_ends_it(tmp_path: Path) -> None:
    command = toy_command()
    with run_server(command, tmp_path, tmp_path) as server:
        assert is_ready(command.port, "/health")
        assert server.cpu_s() > 0
    assert not is_ready(command.port, "/health")
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)


def test_run_server_ends_children_of_other_sessions_also_after_an_error(tmp_path: Path) -> None:
    pid_file = tmp_path / "child"
    with (
        pytest.raises(KeyError),
        run_server(toy_command("--child", str(pid_file)), tmp_path, tmp_path),
    ):
        raise KeyError
    child = int(pid_file.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_server_that_ends_is_described_by_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchmarkError, match="toy ended with exit code 1: no model here"),
        run_server(toy_command("--fail", "no model here"), tmp_path, tmp_path),
    ):
        pass


def test_a_server_that_never_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 0.5)
    command = ServerCommand("mute", ["sleep", "60"], free_port(), "/", {})
    with (
        pytest.raises(BenchmarkError, match="mute was not ready after"),
        run_server(command, tmp_path, tmp_path),
    ):
        pass


def test_sigterm_during_a_phase_of_load_ends_the_server(tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.json"
    vectors.write_text('{"good": [1.0]}')
    command = toy_command("--vectors", str(vectors))
    stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))

    def run_until_stopped() -> None:
        plan = LoadPlan(connections=2, seconds=600.0)
        with (
            processes.stop_signals_interrupt(),
            run_server(command, tmp_path, tmp_path) as server,
        ):
            request = server.address.build_post("/embed", b'{"inputs": "good"}')
            stop.start()
            uvloop.run(run_load(server.address, Workload([request]), plan))

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped()
    assert not is_ready(command.port, "/health")
