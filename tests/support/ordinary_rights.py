"""Rights of an ordinary user, for tests of files that the user must not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65_534  # user id


@contextmanager
def ordinary_rights() -> Iterator[None]:
    """Drop root privileges within the block, because root can read every file."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)
