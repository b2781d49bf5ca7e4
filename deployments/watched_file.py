"""A file that other processes replace, looked at again now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

CHECK_INTERVAL_S = 1.0  # between looks at the file; a look takes microseconds


class WatchedFile:
    """Tells that a file has changed, CHECK_INTERVAL_S later at most."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._checked_s = clock()
        self._state = _read_state(path)

    def has_changed(self) -> bool:
        """Return whether the file differs from the one at the last call that said so."""
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return False
        self._checked_s = now_s
        previous, self._state = self._state, _read_state(self.path)
        return self._state != previous


def _read_state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the contents; None without the file. Links are followed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
