"""Errors of a cluster that cannot be started."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.terminal.command_line import HintedError


class StartError(HintedError):
    """The cluster cannot be started. `hint` is the remedy."""

    code = "cannot_start"


class UnusableConfig(StartError):
    """The config must be changed before it can be served. A service manager does not try again."""

    code = "unusable_config"


# Errors of a host that lacks processes, memory or file descriptors. Its disk is not the cause.
_HOST_ERRORS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_WRITE_HINT = "free space on its disk, or let this user write there"


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raise StartError in place of an OSError. The message names the error's file, else `path`."""
    try:
        yield
    except OSError as exc:
        raise StartError(
            f"cannot use `{exc.filename or path}`: {exc.strerror or exc}",
            hint="" if exc.errno in _HOST_ERRORS else _WRITE_HINT,
        ) from exc
