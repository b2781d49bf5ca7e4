"""Locks between processes; the kernel releases the locks of a killed process.

The locks are advisory locks (`flock`) on files of the store. They work between machines if the
shared file system supports `flock`. NFS does so for files, but not for directories: builds and
collections of one store belong on one machine there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the exclusive lock on the file `path`. Create the file first, and remove it at the end.

    Blocks until no other process holds the lock, or until a signal handler raises. Before each
    wait, `on_wait` gets a description of the holder, which is empty if the holder is unknown.
    """
    descriptor = _acquire(path, on_wait)
    try:
        yield
    finally:
        _release(descriptor, path)


@contextmanager
def try_exclusive_lock(path: Path) -> Iterator[bool]:
    """Hold the lock like `exclusive_lock` and yield True, or yield False instead of blocking."""

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


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock on `path`; False if there is no such file.

    Raises OSError if the file cannot be opened or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that concurrent checks do not mistake each other for a holder.
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the exclusive lock on a directory itself. Blocks while another process holds it."""
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
                on_wait(_read_holder(descriptor))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # If the previous holder removed this file before this process locked it, try again:
            # another process may already have locked a new file at `path`.
            if _is_at(descriptor, path):
                with suppress(OSError):  # a full disk: the commands that free space need locks too
                    holder = f"process {os.getpid()} on {os.uname().nodename}"
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, holder.encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(descriptor: int, path: Path) -> None:
    try:
        if _is_at(descriptor, path):  # still locked, so no other process holds this file
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        current = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), current)
