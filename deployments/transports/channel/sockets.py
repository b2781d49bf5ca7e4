"""Private directories of Unix sockets. A new replica removes the directories of killed replicas."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

_PREFIX = "hundredfold-channel-"
_SOCKET = "replica.sock"
_MAX_PATH_BYTES = 107  # limit of `sockaddr_un` for the path of a socket


class SocketDirectory(NamedTuple):
    """A directory of mode 0700 with one socket."""

    path: Path

    @classmethod
    def create(cls) -> Self:
        """Create a directory. First remove the directories of processes that have ended."""
        root = Path(tempfile.gettempdir())
        _remove_orphans(root)
        return cls(Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root)))

    @property
    def socket_path(self) -> str:
        """The path, or "" if it is too long for a socket: the replica then listens on TCP only."""
        path = str(self.path / _SOCKET)
        return path if len(os.fsencode(path)) <= _MAX_PATH_BYTES else ""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_orphans(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            is_own = path.lstat().st_uid == os.getuid()
        except OSError:
            continue
        if is_own and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
