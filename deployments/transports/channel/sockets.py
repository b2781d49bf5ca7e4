"""Private directories of Unix sockets. A new replica removes the directories of killed replicas."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple, Self

from deployments.claimed_directory import claim_directory, remove_unused

_PREFIX = "hundredfold-channel-"
_SOCKET = "replica.sock"
_MAX_PATH_BYTES = 107  # limit of `sockaddr_un` for the path of a socket


class SocketDirectory(NamedTuple):
    """A directory of mode 0700 with one socket, locked by this process."""

    path: Path
    lock: int  # descriptor

    @classmethod
    def create(cls) -> Self:
        """Create a directory. First remove the directories of processes that have ended."""
        root = Path(tempfile.gettempdir())
        for path in root.glob(f"{_PREFIX}*"):
            remove_unused(path)
        while True:
            path = root / f"{_PREFIX}{secrets.token_hex(4)}"
            lock = claim_directory(path)
            if lock is not None:
                return cls(path, lock)

    @property
    def socket_path(self) -> str:
        """The path, or "" if it is too long for a socket: the replica then listens on TCP only."""
        path = str(self.path / _SOCKET)
        return path if len(os.fsencode(path)) <= _MAX_PATH_BYTES else ""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
