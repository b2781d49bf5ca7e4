"""One holder at a time, whom everybody can name, and nothing left when it is gone."""

from __future__ import annotations

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


def never(holder: str) -> None:
    raise AssertionError(f"it waited for {holder}, and nobody has the lock")


def test_a_lock_is_held_by_one_and_gone_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with exclusive_lock(path, never):
        assert is_locked(path)
        assert path.read_text() == f"process {os.getpid()} on {os.uname().nodename}"
        with try_exclusive_lock(path) as is_ours:
            assert not is_ours
        assert is_locked(path), "who did not get the lock must not give it back"
    assert not path.exists()
    with try_exclusive_lock(path) as is_ours:
        assert is_ours
        assert is_locked(path)
    assert not path.exists()


def test_a_failure_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for hold in (exclusive_lock(path, never), try_exclusive_lock(path)):
        with pytest.raises(ZeroDivisionError), hold:
            raise ZeroDivisionError
        assert not path.exists()


def test_what_a_killed_process_left_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("process 1 of a machine with a name that is longer than any of ours")
    assert not is_locked(path)
    with exclusive_lock(path, never):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        assert "longer" not in path.read_text()


def test_a_directory_is_a_lock_that_stays(tmp_path: Path) -> None:
    with directory_lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert tmp_path.is_dir()


def test_a_place_where_nothing_can_be_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "lock"
    with pytest.raises(NotADirectoryError):
        is_locked(path)
    with pytest.raises(NotADirectoryError), try_exclusive_lock(path):
        pass


def test_a_lock_file_that_was_replaced_while_waiting_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    told: list[str] = []
    waits, entered = threading.Semaphore(0), threading.Event()

    def tell(holder: str) -> None:
        told.append(holder)
        waits.release()

    def wait() -> None:
        with exclusive_lock(path, tell):
            entered.set()

    with exclusive_lock(path, tell):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waits.acquire(timeout=10)
        path.unlink()
        newcomer = exclusive_lock(path, tell)
        newcomer.__enter__()
    try:
        assert waits.acquire(timeout=10), "it took the lock of a file that is gone for the lock"
        assert not entered.is_set()
    finally:
        newcomer.__exit__(None, None, None)
    assert entered.wait(timeout=10)
    waiter.join()
    assert len(told) == 2
    assert not path.exists()
