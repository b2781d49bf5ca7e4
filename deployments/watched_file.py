"""A file that other processes replace, checked for changes at intervals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

FileState: TypeAlias = tuple[int, ...]

CHECK_INTERVAL_S = 1.0  # seconds between checks of the file; a check takes microseconds


class WatchedFile:
    """Detector of changes of a file, at most CHECK_INTERVAL_S late."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._checked_s = clock()
        self._state = read_file_state(path)

    def has_changed(self) -> bool:
        """Return whether the file has changed since the last check.

        Within CHECK_INTERVAL_S of that check, return False without a new check.
        """
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return False
        self._checked_s = now_s
        previous, self._state = self._state, read_file_state(self.path)
        return self._state != previous

    def recheck_after(self, error: BaseException) -> None:
        """Let the next check report a change, if the file may become readable without a change.

        `error` was raised from the OSError of a failed read, such as too many open files. A missing
        file or right is excluded: its correction is a change.
        """
        cause = error.__cause__
        corrected = isinstance(cause, FileNotFoundError | PermissionError)
        if isinstance(cause, OSError) and not corrected:
            self._state = ()  # no file has this state


def read_file_state(path: Path) -> FileState | None:
    """Return values that change with the contents, owner or mode; None if the file is missing.

    The time of the last status change (ctime) shows a new owner or mode: a file may be unreadable
    until they are corrected. Follows links.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
