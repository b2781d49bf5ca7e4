"""File and directory locks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from deployments.artifacts.locks import (
    directory_lock,
    exclusive_lock,
    is_locked,
    try_exclusive_lock,
)
from tests.support.fakes import TIMEOUT_S, fail_with


def fail_on_wait(holder: str) -> None:
    raise AssertionError(f"the lock is free, but it waited for {holder}")


def test_lock_has_one_holder_and_is_removed_on_release(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with exclusive_lock(path, fail_on_wait):
        assert is_locked(path)
        assert path.read_text() == f"process {os.getpid()} on {os.uname().nodename}"
        with try_exclusive_lock(path) as acquired:
            assert not acquired
        assert is_locked(path), "a failed attempt must not release the lock"
    assert not path.exists()
    with try_exclusive_lock(path) as acquired:
        assert acquired
        assert is_locked(path)
    assert not path.exists()


def test_lock_needs_no_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", fail_with(errno.ENOSPC))
    with exclusive_lock(tmp_path / "lock", fail_on_wait):
        assert is_locked(tmp_path / "lock")


def test_lock_is_released_on_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for hold in (exclusive_lock(path, fail_on_wait), try_exclusive_lock(path)):
        with pytest.raises(ZeroDivisionError), hold:
            raise ZeroDivisionError
        assert not path.exists()


def test_lock_file_of_a_killed_process_is_not_locked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("process 1 of a machine with a name that is longer than any real one")
    assert not is_locked(path)
    with exclusive_lock(path, fail_on_wait):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        assert "longer" not in path.read_text()


def test_directory_lock_keeps_the_directory(tmp_path: Path) -> None:
    with directory_lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert tmp_path.is_dir()


def test_lock_in_an_impossible_place_raises_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "lock"
    with pytest.raises(NotADirectoryError):
        is_locked(path)
    with pytest.raises(NotADirectoryError), try_exclusive_lock(path):
        pass


def test_lock_waits_again_when_its_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holders: list[str] = []
    waiting, entered = threading.Semaphore(0), threading.Event()

    def record_holder(holder: str) -> None:
        holders.append(holder)
        waiting.release()

    def wait() -> None:
        with exclusive_lock(path, record_holder):
            entered.set()

    with exclusive_lock(path, record_holder):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waiting.acquire(timeout=TIMEOUT_S)
        path.unlink()
        second_lock = exclusive_lock(path, record_holder)
        second_lock.__enter__()
    try:
        assert waiting.acquire(timeout=TIMEOUT_S), "it accepted the lock of a deleted file"
        assert not entered.is_set()
    finally:
        second_lock.__exit__(None, None, None)
    assert entered.wait(timeout=TIMEOUT_S)
    waiter.join()
    assert len(holders) == 2
    assert not path.exists()
