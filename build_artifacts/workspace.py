"""Where a build happens before anybody can see it.

`<store>/.building/<random>/` is on the same file system as the versions, so that publishing is one
rename. A build holds a lock on its directory; the kernel drops the locks of a killed process, so
the next build knows what was left behind and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_artifacts.errors import BuildError

BUILDING_NAME = ".building"


class Workspace:
    """One build's private directory. Made by `workspace`, gone when the build ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root.with_suffix(".log")

    def directory(self, name: str) -> Path:
        """An existing directory for one step's files."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send everything written to stdout and stderr, C++ libraries included, to the log."""
        with self.log.open("ab") as log, _redirected(log.fileno(), (1, 2)):
            yield

    def record_failure(self) -> None:
        """Append the traceback of the exception being handled to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)


@contextmanager
def workspace(store: Path) -> Iterator[Workspace]:
    """A fresh workspace in `store`; removed on every way out, its log only on success."""
    try:
        root, lock = _fresh_directory(store / BUILDING_NAME)
    except OSError as exc:
        raise BuildError(
            f"cannot write to the store {store}: {exc.strerror}", hint="pass another `--store DIR`"
        ) from exc
    place = Workspace(root)
    try:
        yield place
        place.log.unlink(missing_ok=True)
    except Exception:
        place.record_failure()
        raise
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _fresh_directory(building: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock, once the abandoned are gone."""
    building.mkdir(parents=True, exist_ok=True)
    # Held while starting, so that no other build takes the unlocked new directory for abandoned.
    starting = _lock(building, fcntl.LOCK_EX)
    try:
        _remove_abandoned(building)
        root = Path(tempfile.mkdtemp(dir=building))
        return root, _lock(root, fcntl.LOCK_EX)
    finally:
        os.close(starting)


def _lock(directory: Path, operation: int) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(building: Path) -> None:
    for path in sorted(building.iterdir()):
        if path.is_dir() and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".log" and not path.with_suffix("").exists():
            path.unlink(missing_ok=True)


def _is_abandoned(directory: Path) -> bool:
    try:
        os.close(_lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def _redirected(target: int, descriptors: tuple[int, ...]) -> Iterator[None]:
    _flush()  # what was said before belongs where it was said
    saved = [os.dup(descriptor) for descriptor in descriptors]
    try:
        for descriptor in descriptors:
            os.dup2(target, descriptor)
        yield
    finally:
        _flush()
        for copy, descriptor in zip(saved, descriptors, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
