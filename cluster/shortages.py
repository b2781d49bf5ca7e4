"""What a host lacked when a start failed: memory, or space for the files of Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.start_errors import StartError, file_errors
from deployments.host.machine import ControlGroups

MIN_RAY_BYTES = 4 << 20  # free space for Ray's logs; those of a start take 2 MB
_SPACE_HINT = "free space on its disk, or set `$RAY_TMPDIR` to a directory on another one"


def check_space(ray_directory: Path) -> None:
    """Raise StartError if the disk of Ray's directory is full: Ray would wait without an error."""
    if (message := _find_full_disk(ray_directory)) is not None:
        raise StartError(message, hint=_SPACE_HINT)


@contextmanager
def explain_shortages(ray_directory: Path) -> Iterator[None]:
    """Add to a StartError of the block what the host lacked, with a remedy.

    Without that, a start whose processes are killed again and again only takes too long.
    """
    groups = ControlGroups.own()
    kills_before = groups.oom_kills()
    try:
        yield
    except StartError as error:
        if kills := groups.oom_kills() - kills_before:
            message = f"processes that the kernel has killed for lack of memory: {kills}"
            remedy = "`hundredfold doctor` compares the memory of this host with the config"
        elif (found := _find_full_disk(ray_directory)) is not None:
            message, remedy = found, _SPACE_HINT
        else:
            raise
        hint = "; ".join(filter(None, (error.hint, remedy)))
        raise type(error)(f"{error.message}\n{message}", hint=hint) from error


def _find_full_disk(directory: Path) -> str | None:
    with file_errors(directory):
        nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        disk = os.statvfs(nearest)
    # File systems reserve blocks for root.
    free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
    if free >= MIN_RAY_BYTES:
        return None
    return f"`{directory}` has {free / 1e6:.1f} MB of free space: Ray writes its logs there"
