"""What builds left behind in a store, and nobody will come back for."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from build_artifacts.storage.scratch import abandoned
from build_artifacts.storage.workspace import lock_path, log_path
from deployments.locks import directory_held, is_held
from deployments.store import VERSION

ABANDONED_AFTER_S = 7 * 86_400.0
# Between writing a file beside and renaming it pass milliseconds.
TEMPORARY_AFTER_S = 3_600.0
# The directory of a build; its lock and log are called like it.
PLACE = re.compile(rf"(?P<model>.+)--(?P<version>{VERSION.pattern})")
_TEMPORARY = re.compile(r"\..+\.\d+")  # `.latest.4711` is written by process 4711


class Kind(StrEnum):
    """What a piece of garbage is."""

    VERSION = "version"
    BUILD = "build"  # an unfinished build, or the log of a failed one
    SCRATCH = "scratch"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to remove."""

    kind: Kind
    name: str  # `model:version` of versions and builds
    path: Path
    size: int  # bytes
    why: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is, and how old."""

    size: int  # bytes of the plain files
    changed_s: float  # of the newest file or directory, seconds since the epoch


def old_builds(building: Path, now_s: float) -> Iterator[Item]:
    """Builds that nobody is at work on, unchanged for ABANDONED_AFTER_S."""
    names = {re.sub(r"\.(log|lock)$", "", path.name) for path in building.iterdir()}
    for name in sorted(names):
        place, root = PLACE.fullmatch(name), building / name
        if place is None or is_held(lock_path(root)):
            continue
        extent = measure(root, log_path(root), lock_path(root))
        age_s = now_s - extent.changed_s
        if age_s > ABANDONED_AFTER_S:
            why = "unfinished" if root.is_dir() else "left by a failure"
            ref = f"{place['model'].replace('--', '/')}:{place['version']}"
            told = f"{why}, {age_s / 86_400:.0f} days old"
            yield Item(Kind.BUILD, ref, root, extent.size, told)


def stray_logs(building: Path, now_s: float) -> Iterator[Item]:
    """Logs that belong to no version."""
    for path in sorted(building.glob("*.log")):
        extent = measure(path)
        if not PLACE.fullmatch(path.stem) and now_s - extent.changed_s > ABANDONED_AFTER_S:
            yield Item(Kind.FILE, path.name, path, extent.size, "a log without a build")


def dead_scratch(building: Path) -> list[Item]:
    """Scratch directories whose process is gone."""
    with directory_held(building):
        found = abandoned(building)
    why = "left by a process that was killed"
    return [Item(Kind.SCRATCH, path.name, path, measure(path).size, why) for path in found]


def temporaries(model: Path, now_s: float) -> Iterator[Item]:
    """Files in a model's directory that were being written beside their place."""
    for path in plain_files(model):
        extent = measure(path)
        if _TEMPORARY.fullmatch(path.name) and now_s - extent.changed_s > TEMPORARY_AFTER_S:
            name = path.relative_to(model.parent).as_posix()
            why = "half-written by a process that was killed"
            yield Item(Kind.FILE, name, path, extent.size, why)


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def plain_files(directory: Path) -> Iterator[Path]:
    """Every file below `directory`, without links and without what links lead to."""
    return (path for path in _below(directory) if path.is_file() and not path.is_symlink())


def measure(*roots: Path) -> Extent:
    """The extent of some files and trees together; when all are gone, they changed just now."""
    size, changed_s = 0, -math.inf
    for root in roots:
        for path in (root, *(_below(root) if is_own_directory(root) else ())):
            with suppress(FileNotFoundError):
                state = path.lstat()
                changed_s = max(changed_s, state.st_mtime)
                size += state.st_size if stat.S_ISREG(state.st_mode) else 0
    return Extent(size, changed_s if changed_s > -math.inf else math.inf)


def _below(directory: Path) -> Iterator[Path]:
    for top, directories, names in os.walk(directory):
        yield from (Path(top, name) for name in (*directories, *names))
