"""Locks between processes that die with their holder: the kernel drops a killed process's locks.

Advisory locks on files of the store (`flock`); they hold between the machines that share it where
its file system passes them on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """The exclusive lock on the file `path`, made for it and removed with it.

    Blocks while somebody else has it, until a signal's handler raises; `on_wait` is told before,
    with the holder in words, empty where it is not known.
    """
    descriptor = _acquire(path, on_wait)
    try:
        yield
    finally:
        _release(descriptor, path)


@contextmanager
def try_exclusive_lock(path: Path) -> Iterator[bool]:
    """Like `held`, but does not wait: False where somebody else has the lock."""

    def refuse(_: str) -> None:
        raise BlockingIOError

    try:
        descriptor = _acquire(path, refuse)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        _release(descriptor, path)


def is_held(path: Path) -> bool:
    """Whether anybody holds the exclusive lock on a file or directory; False where nothing is."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)  # shared: askers do not meet each other
    finally:
        os.close(descriptor)


@contextmanager
def directory_held(directory: Path) -> Iterator[None]:
    """The exclusive lock on a directory itself; waits for it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, on_wait: Callable[[str], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                on_wait(_holder(descriptor))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The last holder removed the file we waited for: another one may be locked by now.
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(descriptor: int, path: Path) -> None:
    try:
        if _is_at(descriptor, path):  # still locked, so nobody else can be in possession of it
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
