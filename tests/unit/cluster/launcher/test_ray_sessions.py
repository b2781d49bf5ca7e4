"""Removal of the directories of Ray's sessions that have ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cluster.launcher.ray_sessions import KEPT_SESSIONS, list_sessions, remove_ended_sessions

ENDED_PID = 2**31 - 1  # above the largest process id of Linux


def create_session(directory: Path, number: int, pid: int = ENDED_PID) -> Path:
    """Create the session directory that started `number` s after the others."""
    session = directory / "ray" / f"session_2026-11-28_10-54-{number:02}_241062_{pid}"
    (session / "sockets").mkdir(parents=True)
    return session


@pytest.fixture
def kept(tmp_path: Path) -> list[Path]:
    """The last sessions, whose logs stay."""
    return [create_session(tmp_path, 50 + number) for number in range(KEPT_SESSIONS)]


def test_session_of_an_ended_server_is_removed(tmp_path: Path, kept: list[Path]) -> None:
    create_session(tmp_path, 1)
    create_session(tmp_path, 2)
    other = tmp_path / "ray" / "session_notes"
    other.mkdir()
    latest = tmp_path / "ray" / "session_latest"
    latest.symlink_to(kept[-1])
    remove_ended_sessions(tmp_path)
    assert list_sessions(tmp_path) == kept
    assert other.is_dir()
    assert latest.is_dir()


def test_directory_without_sessions_is_no_error(tmp_path: Path) -> None:
    remove_ended_sessions(tmp_path)


@pytest.mark.usefixtures("kept")
def test_session_stays_while_its_starter_lives(tmp_path: Path) -> None:
    session = create_session(tmp_path, 1, os.getpid())
    remove_ended_sessions(tmp_path)
    assert session.is_dir()


def test_session_stays_while_a_process_listens_there() -> None:
    """Containers that share the directory do not see the processes of each other."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's path has at most 107 bytes
        directory = Path(short)
        session = create_session(directory, 1)
        for number in range(KEPT_SESSIONS):
            create_session(directory, 50 + number)
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.bind(str(session / "sockets" / "raylet"))
            raylet.listen()
            remove_ended_sessions(directory)
            assert session.is_dir()
        remove_ended_sessions(directory)
        assert not session.exists()


def test_session_of_a_process_that_hangs_stays_without_waiting_for_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, ExitStack() as sockets:
        directory = Path(short)
        session = create_session(directory, 1)
        for number in range(KEPT_SESSIONS):
            create_session(directory, 50 + number)
        address = str(session / "sockets" / "raylet")
        raylet = sockets.enter_context(socket.socket(socket.AF_UNIX))
        raylet.bind(address)
        raylet.listen(0)
        with suppress(BlockingIOError):  # when the backlog is full
            while True:
                waiting = sockets.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(address)
        remove_ended_sessions(directory)
        assert session.is_dir()


@pytest.mark.usefixtures("kept")
def test_session_stays_while_one_of_its_processes_lives(tmp_path: Path) -> None:
    """`ray start` without `--block` ends, and its processes live."""
    session = create_session(tmp_path, 1)
    script = "print(flush=True); input()"
    command = [sys.executable, "-c", script, f"--log-dir={session}/logs"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # a process has no command line for a moment after its start
        remove_ended_sessions(tmp_path)
        assert session.is_dir()
    remove_ended_sessions(tmp_path)
    assert not session.exists()
