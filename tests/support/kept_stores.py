"""The store of built models that runs of the tests share, one for each version of the compiler."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tests.support.source_digests import digest_compiler

# Not that of users, which $HUNDREDFOLD_STORE names: the tests remove stores here.
DIRECTORY = Path("~/.cache/hundredfold").expanduser()
NAME = "test-store"
# Checkouts with other compilers may share the directory, and one of them may be testing now.
UNUSED_S = 24 * 3600.0


def name_store() -> Path:
    """Return the path of the store with the models of this checkout's compiler."""
    return DIRECTORY / f"{NAME}-{digest_compiler()}"


def use_store(store: Path) -> None:
    """Mark `store` as in use, and remove the stores beside it that were not for a long time."""
    store.mkdir(parents=True, exist_ok=True)
    os.utime(store)
    for other in store.parent.glob(f"{NAME}*"):
        if other != store and time.time() - other.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)
