"""Liveness probes of servers that answer, are stopped (SIGSTOP) or have ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import psutil
import pytest

from cluster.launcher import liveness
from cluster.launcher.liveness import MAX_SILENT_PROBES, Liveness, StoppedProcesses, answers
from cluster.ports import find_free_port
from tests.support.waiting import TIMEOUT_S, wait_for


@pytest.fixture
def grpc_port() -> Iterator[int]:
    """Start a gRPC server and yield its port. Ray's GCS and raylet are such servers."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None)


@pytest.fixture
def stopped_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield a port whose connections stay in the backlog, as those to a stopped process do."""
    monkeypatch.setattr(liveness, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_grpc_server_answers(grpc_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ANSWER_S", TIMEOUT_S)
    assert answers(grpc_port)


def test_stopped_and_ended_servers_do_not_answer(stopped_port: int) -> None:
    assert not answers(stopped_port)
    assert not answers(find_free_port(1, 0))


def test_server_is_silent_after_some_probes_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering = {1}
    monkeypatch.setattr(liveness, "PERIOD_S", 0)
    monkeypatch.setattr(liveness, "answers", answering.__contains__)
    watched = Liveness({"GCS": 1, "the raylet": 2})
    for _ in range(MAX_SILENT_PROBES - 1):
        assert watched.find_silent() is None
    assert watched.find_silent() == "the raylet"
    answering.add(2)
    assert watched.find_silent() is None


def stop(process: psutil.Process) -> None:
    """Stop a process. Its state is `stopped` just before its last context switch counts."""

    def is_stopped() -> bool:
        if process.status() != psutil.STATUS_STOPPED:
            return False
        before = liveness.count_context_switches(process.pid)
        time.sleep(0.01)
        return liveness.count_context_switches(process.pid) == before

    process.suspend()
    wait_for(is_stopped)


def test_stopped_process_is_killed_at_the_second_look(
    monkeypatch: pytest.MonkeyPatch, sleeper: psutil.Process
) -> None:
    monkeypatch.setattr(liveness, "PERIOD_S", 0)
    stop(sleeper)
    watched = StoppedProcesses(lambda: [sleeper] if sleeper.is_running() else [])
    assert watched.kill() == []
    assert watched.kill() == ["sleep"]
    assert sleeper.wait(TIMEOUT_S) == -signal.SIGKILL
    assert watched.kill() == []


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_process_that_goes_on_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PERIOD_S", 0)
    looks = iter([[psutil.Process()], [], [psutil.Process()], []])
    watched = StoppedProcesses(lambda: next(looks))
    assert [watched.kill() for _ in range(4)] == [[], [], [], []]


def test_idle_process_that_goes_on_between_two_stops_is_spared(
    monkeypatch: pytest.MonkeyPatch, sleeper: psutil.Process
) -> None:
    monkeypatch.setattr(liveness, "PERIOD_S", 0)
    watched = StoppedProcesses(lambda: [sleeper])
    for _ in range(5):
        stop(sleeper)
        assert watched.kill() == []
        sleeper.resume()
        wait_for(lambda: sleeper.status() == psutil.STATUS_SLEEPING)
    stop(sleeper)
    assert [watched.kill(), watched.kill()] == [[], ["sleep"]]


BUSY_THREAD = """
import threading, time
def work():
    while True:
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
print("begun", flush=True)
threading.Event().wait()
"""


def test_context_switches_of_all_threads_count() -> None:
    """On a busy host, the first thread may get no turn between two stops."""
    with subprocess.Popen([sys.executable, "-c", BUSY_THREAD], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)
        first = process.num_ctx_switches()
        before = liveness.count_context_switches(child.pid)
        wait_for(lambda: liveness.count_context_switches(child.pid) > before + 20)
        assert sum(process.num_ctx_switches()) < sum(first) + 20
        child.kill()
    assert liveness.count_context_switches(child.pid) == 0
