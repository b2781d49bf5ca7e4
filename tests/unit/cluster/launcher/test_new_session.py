"""Programs that run themselves again as leaders of a new session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.ray_cluster import find_session
from tests.support.waiting import TIMEOUT_S, wait_for

# A program that runs itself again as leader of a new session. The leader writes its process id to a
# file and waits for a SIGINT. Half a second later it exits with the number of SIGINTs it received.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from cluster.launcher.new_session import leads_own_session, run_in_new_session

if not leads_own_session():
    sys.exit(run_in_new_session([signal.SIGINT]))
received = []
signal.signal(signal.SIGINT, lambda number, _: received.append(number))
signal.signal(signal.SIGTERM, signal.SIG_DFL)
new = Path(sys.argv[1]).with_suffix(".new")
new.write_text(str(os.getpid()))
new.rename(sys.argv[1])
while not received:
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(len(received))
"""

# PROGRAM, with a SIGINT that the first process receives before Popen has returned.
INTERRUPTED = (
    """
import os, signal, subprocess, sys, time
from pathlib import Path

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if options.get("start_new_session"):
            while not Path(sys.argv[1]).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Popen
"""
    + PROGRAM
)


def start(pid_file: Path, program: str = PROGRAM, **options: bool | int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, str(pid_file)]
    return subprocess.Popen(command, **options)  # type: ignore[call-overload, no-any-return]


def wait_for_leader(pid_file: Path) -> psutil.Process:
    wait_for(pid_file.exists)
    leader = psutil.Process(int(pid_file.read_text()))
    assert find_session(leader) == leader.pid
    return leader


@pytest.fixture
def pid_file(tmp_path: Path) -> Path:
    return tmp_path / "pid"


def test_signal_of_a_terminal_reaches_the_leader_once(pid_file: Path) -> None:
    process = start(pid_file, process_group=0)  # as a shell starts a command
    assert wait_for_leader(pid_file).ppid() == process.pid
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert process.wait(TIMEOUT_S) == 1


def test_signal_during_the_start_reaches_the_leader(pid_file: Path) -> None:
    assert start(pid_file, INTERRUPTED).wait(TIMEOUT_S) == 1


def test_leader_without_terminal_needs_no_new_session(pid_file: Path) -> None:
    process = start(pid_file, start_new_session=True)
    assert wait_for_leader(pid_file).pid == process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 1


def test_exit_by_a_signal_is_reported_as_by_a_shell(pid_file: Path) -> None:
    process = start(pid_file)
    wait_for_leader(pid_file).terminate()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_leader_ends_if_its_parent_is_killed(pid_file: Path) -> None:
    process = start(pid_file)
    leader = wait_for_leader(pid_file)
    process.kill()
    process.wait(TIMEOUT_S)
    leader.wait(TIMEOUT_S)
