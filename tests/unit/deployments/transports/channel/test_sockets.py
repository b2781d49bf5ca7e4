"""Private directories of the Unix sockets of replicas."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from deployments.transports.channel.sockets import SocketDirectory


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_live_directory_is_kept_and_one_that_was_left_is_removed(root: Path) -> None:
    live = SocketDirectory.create()
    # The live pid in the name must not count: containers that share a directory have own pids.
    left = root / f"hundredfold-socket-{os.getpid()}-left"
    left.mkdir()
    second = SocketDirectory.create()
    assert live.path.exists()
    assert not left.exists()
    assert second.path != live.path
    for each in (live, second):
        each.remove()
    assert list(root.iterdir()) == []


def test_other_directories_are_kept(root: Path) -> None:
    (root / "hundredfold-other").mkdir()
    SocketDirectory.create().remove()
    assert [path.name for path in root.iterdir()] == ["hundredfold-other"]


def test_file_system_without_locks_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        SocketDirectory.create()
    assert list(root.iterdir()) == []


def test_long_path_gives_no_socket(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = root / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = SocketDirectory.create()
    assert directory.socket_path == ""
    directory.remove()
