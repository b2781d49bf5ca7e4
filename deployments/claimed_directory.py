"""Directories in shared places, such as /tmp, that a process locks while it uses them.

The lock shows whether a directory is in use. A process id in the directory's name would not show
this, because containers that share /tmp may have processes with equal ids. systemd-tmpfiles, which
removes old files of /tmp, skips locked directories.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path


def claim_directory(path: Path) -> int | None:
    """Create `path` as an empty directory of mode 0700. Return the descriptor that holds its lock.

    Replace a directory that an ended process left. Return None if `path` is in use or cannot be
    removed, for example because it belongs to another user. Raises OSError if no directory can be
    created or locked there.
    """
    remove_unused(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return None
    try:
        return _lock(path)
    except OSError:
        path.rmdir()
        raise


def remove_unused(path: Path) -> None:
    """Remove a directory of this user, unless a process has locked it."""
    try:
        descriptor = _lock(path)
    except OSError:  # no locks here, so a process may use the directory unnoticed
        return
    if descriptor is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Lock a directory of this user. Return None if it is locked, missing or of another user.

    Raises OSError if its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        if state.st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and flock, another process may have removed or replaced the directory.
            if os.path.samestat(state, path.lstat()):
                return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
