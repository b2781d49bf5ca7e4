"""Atomic replacement of files."""

from __future__ import annotations

import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import Path

TEMPORARY_FILE = re.compile(r"\..+\.\d+")  # `.latest.4711.1403`: process 4711, thread 1403


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file: readers see the old or the new content, also after a power failure.

    The new file has the owner, group and mode of the old one. If there is no old file, or if this
    process may not set the owner, the new file has `mode`, to which the umask applies. Raises
    OSError; then the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            _keep_owner(path, descriptor)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _keep_owner(path: Path, descriptor: int) -> None:
    """Set the owner, group and mode of an open file to those of `path`.

    The same users can then read the new file. If this process may not change the owner, the open
    file keeps its own owner, group and mode.
    """
    with suppress(OSError):  # no such file, or no right to change the owner
        old = path.stat()
        os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
