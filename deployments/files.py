"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

TEMPORARY_FILE = re.compile(r"\..+\.\d+")  # `.latest.4711.1403` is written by process 4711


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file: readers see the old or the new content, also after a power failure.

    The umask applies to `mode`. Raises OSError; then the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
