"""Private directories of Unix sockets. A new replica removes the directories of killed replicas."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from deployments.claimed_directory import claim_directory, remove_unused

_PREFIX = "hundredfold-socket-"
_SOCKET = "replica.sock"
_MAX_TRIES = 10  # random names; the first one is nearly always new
_MAX_PATH_BYTES = 107  # limit of `sockaddr_un` for the path of a socket


class SocketDirectory(NamedTuple):
    """A directory of mode 0700 with one socket, locked by this process."""

    path: Path
    lock: int  # file descriptor that holds the lock

    @classmethod
    def create(cls) -> Self:
        """Create a directory. First remove the directories of processes that have ended.

        Raises OSError if no directory can be created and locked.
        """
        root = Path(tempfile.gettempdir())
        for path in root.glob(f"{_PREFIX}*"):
            remove_unused(path)
        for _ in range(_MAX_TRIES):
            path = root / f"{_PREFIX}{secrets.token_hex(4)}"
            lock = claim_directory(path)
            if lock is not None:
                return cls(path, lock)
        raise OSError(f"cannot create a directory of this user in `{root}`")

    @property
    def socket_path(self) -> str:
        """The path, or "" if it is too long for a socket: the replica then listens on TCP only."""
        path = str(self.path / _SOCKET)
        return path if len(os.fsencode(path)) <= _MAX_PATH_BYTES else ""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
