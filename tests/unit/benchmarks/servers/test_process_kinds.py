"""The search for server processes finds only those that the launcher started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.servers.process_kinds import ProcessKind, find_processes
from tests.support.waiting import wait_for

WORDS = "a-process-to-be-found"
SLEEP = f"import time; time.sleep(60) # {WORDS}"
LAUNCH = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], process_group=0)
child.wait()
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCH], start_new_session=True)
    children: list[psutil.Process] = []
    try:
        wait_for(lambda: bool(psutil.Process(process.pid).children()))
        children = psutil.Process(process.pid).children()
        yield process
    finally:
        process.kill()
        process.wait()
        for child in children:
            child.kill()


def test_processes_of_the_session_of_the_launcher_are_found(
    launcher: subprocess.Popen[bytes],
) -> None:
    kind = ProcessKind("sleeper", f"# {WORDS}")
    found: list[psutil.Process] = []

    def find() -> bool:
        # The sleeper has no command line while it starts its program, and before that LAUNCH's.
        found[:] = find_processes(launcher.pid, kind)
        return bool(found)

    with subprocess.Popen([sys.executable, "-c", SLEEP]) as stranger:
        try:
            wait_for(find)
            (sleeper,) = found
            assert sleeper.pid == psutil.Process(launcher.pid).children()[0].pid
            assert find_processes(os.getpid(), ProcessKind("none", "no such words")) == []
        finally:
            stranger.kill()
