"""What may be removed from a store: versions without an alias, and what builds left behind.

Every plain file in a model's directory that holds a version and nothing else is an alias; `latest`
is one. A version stays, alias or not, while a build of its model is at work, and while any process
holds an exclusive lock on a file in it. Links are neither followed nor removed.

A running server is not disturbed: it read its graphs when it started, and where it starts again it
goes by the aliases. Versions it was told by number only its configuration knows: pass them.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.storage.workspace import store_errors
from deployments.artifacts.locks import directory_lock, is_locked, try_exclusive_lock
from deployments.artifacts.store import (
    BUILDING_NAME,
    LATEST_NAME,
    TEMPORARY_FILE,
    VERSION,
    find_abandoned_scratch,
    lock_path,
    log_path,
    remove_atomically,
)

ABANDONED_AFTER_S = 7 * 86_400.0
# Between writing a file beside and renaming it pass milliseconds.
TEMPORARY_AFTER_S = 3_600.0
# The directory of a build; its lock and log are called like it.
BUILD_DIRECTORY = re.compile(rf"(?P<model>.+)--(?P<version>{VERSION.pattern})")


class GarbageKind(StrEnum):
    """What a piece of garbage is."""

    VERSION = "version"
    BUILD = "build"  # an unfinished build, or the log of a failed one
    SCRATCH = "scratch"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class GarbageItem:
    """One thing to remove."""

    kind: GarbageKind
    name: str  # `model:version` of versions and builds
    path: Path
    size: int  # bytes
    reason: str


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How much there is, and how old."""

    size: int  # bytes of the plain files
    changed_s: float  # of the newest file or directory, seconds since the epoch


def old_builds(building: Path, now_s: float) -> Iterator[GarbageItem]:
    """Builds that nobody is at work on, unchanged for ABANDONED_AFTER_S."""
    names = {re.sub(r"\.(log|lock)$", "", path.name) for path in building.iterdir()}
    for name in sorted(names):
        place, root = BUILD_DIRECTORY.fullmatch(name), building / name
        if place is None or is_locked(lock_path(root)):
            continue
        extent = measure(root, log_path(root), lock_path(root))
        age_s = now_s - extent.changed_s
        if age_s > ABANDONED_AFTER_S:
            why = "unfinished" if root.is_dir() else "left by a failure"
            ref = f"{place['model'].replace('--', '/')}:{place['version']}"
            told = f"{why}, {age_s / 86_400:.0f} days old"
            yield GarbageItem(GarbageKind.BUILD, ref, root, extent.size, told)


def orphan_logs(building: Path, now_s: float) -> Iterator[GarbageItem]:
    """Logs that belong to no version."""
    for path in sorted(building.glob("*.log")):
        extent = measure(path)
        if (
            not BUILD_DIRECTORY.fullmatch(path.stem)
            and now_s - extent.changed_s > ABANDONED_AFTER_S
        ):
            yield GarbageItem(
                GarbageKind.FILE, path.name, path, extent.size, "a log without a build"
            )


def abandoned_scratch(building: Path) -> list[GarbageItem]:
    """Scratch directories whose process is gone."""
    with directory_lock(building):
        found = find_abandoned_scratch(building)
    why = "left by a process that was killed"
    return [
        GarbageItem(GarbageKind.SCRATCH, path.name, path, measure(path).size, why) for path in found
    ]


def temporary_files(model: Path, now_s: float) -> Iterator[GarbageItem]:
    """Files in a model's directory that were being written beside their place."""
    for path in plain_files(model):
        extent = measure(path)
        if TEMPORARY_FILE.fullmatch(path.name) and now_s - extent.changed_s > TEMPORARY_AFTER_S:
            name = path.relative_to(model.parent).as_posix()
            why = "half-written by a process that was killed"
            yield GarbageItem(GarbageKind.FILE, name, path, extent.size, why)


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def plain_files(directory: Path) -> Iterator[Path]:
    """Every file below `directory`, without links and without what links lead to."""
    return (path for path in _below(directory) if path.is_file() and not path.is_symlink())


def measure(*roots: Path) -> DiskUsage:
    """The extent of some files and trees together; when all are gone, they changed just now."""
    size, changed_s = 0, -math.inf
    for root in roots:
        for path in (root, *(_below(root) if is_own_directory(root) else ())):
            with suppress(FileNotFoundError):
                state = path.lstat()
                changed_s = max(changed_s, state.st_mtime)
                size += state.st_size if stat.S_ISREG(state.st_mode) else 0
    return DiskUsage(size, changed_s if changed_s > -math.inf else math.inf)


def _below(directory: Path) -> Iterator[Path]:
    for top, directories, names in os.walk(directory):
        yield from (Path(top, name) for name in (*directories, *names))


_HEADER = ("WHAT", "NAME", "MB", "WHY")


@dataclass(frozen=True, slots=True)
class Garbage:
    """What `find_garbage` found in `store`, leaving out `keep`."""

    store: Path
    keep: frozenset[str]
    items: tuple[GarbageItem, ...]

    @property
    def size(self) -> int:
        """All of it, in bytes."""
        return sum(item.size for item in self.items)


def find_garbage(store: Path, keep: Collection[str] = ()) -> Garbage:
    """Everything in `store` that may go, except the versions `keep` names as `model:version`.

    Raises BuildError.
    """
    for ref in keep:
        if not ref.partition(":")[2]:
            raise BuildError(f"`{ref}` names no version", hint="write `MODEL:VERSION`")
    kept, now_s, building = frozenset(keep), time.time(), store / BUILDING_NAME
    items: list[GarbageItem] = []
    with store_errors(store, "read"):
        for model in _model_directories(store):
            items += _versions(model, kept, building)
            items += temporary_files(model, now_s)
        if is_own_directory(building):
            items += old_builds(building, now_s)
            items += orphan_logs(building, now_s)
            items += abandoned_scratch(building)
    return Garbage(store, kept, tuple(items))


def remove(garbage: Garbage) -> tuple[GarbageItem, ...]:
    """Remove what was found and may still go; returns what went. Raises BuildError.

    What was found a while ago is looked at again: an alias may have been moved meanwhile.
    """
    store, building = garbage.store, garbage.store / BUILDING_NAME
    still = {(item.kind, item.path) for item in find_garbage(store, garbage.keep).items}
    found = [item for item in garbage.items if (item.kind, item.path) in still]
    with store_errors(store, "clean"):
        if found:
            building.mkdir(exist_ok=True)
        return tuple(item for item in found if _REMOVE[item.kind](building, item))


def describe(garbage: Garbage) -> str:
    """The items in columns, the largest of a kind first, and what they take together."""
    if not garbage.items:
        return f"nothing to remove from {garbage.store}"
    order = list(GarbageKind)
    items = sorted(garbage.items, key=lambda item: (order.index(item.kind), -item.size))
    rows = [_HEADER, *((i.kind, i.name, _megabytes(i.size), i.reason) for i in items)]
    kind, name, size = (max(len(row[column]) for row in rows) for column in range(3))
    lines = [f"{r[0]:<{kind}}  {r[1]:<{name}}  {r[2]:>{size}}  {r[3]}" for r in rows]
    return "\n".join([*lines, f"{len(items)} to remove, {_megabytes(garbage.size)} MB"])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _model_directories(store: Path) -> Iterator[Path]:
    for path in sorted(store.iterdir()) if store.is_dir() else ():
        if not path.name.startswith(".") and is_own_directory(path):
            yield path


def _versions(model: Path, keep: frozenset[str], building: Path) -> Iterator[GarbageItem]:
    pointed = pointed_versions(model)
    if pointed is None or _is_building(building, model.name):
        return
    for path in sorted(model.iterdir()):
        if not VERSION.fullmatch(path.name) or not is_own_directory(path):
            continue
        name = f"{model.name.replace('--', '/')}:{path.name}"
        if path.name not in pointed and name not in keep and not _is_in_use(path):
            yield GarbageItem(
                GarbageKind.VERSION, name, path, measure(path).size, "no alias points to it"
            )


def pointed_versions(model: Path) -> frozenset[str] | None:
    """What the aliases in a model's directory point to; None where one of them cannot be read."""
    pointed = set()
    for path in model.iterdir():
        text = ""
        if path.is_file() and not path.name.startswith("."):
            try:
                with path.open("rb") as file:
                    text = file.read(100).decode(errors="replace").strip()
            except PermissionError:
                return None
        if VERSION.fullmatch(text):
            pointed.add(text)
        elif path.name == LATEST_NAME:
            return None
    return frozenset(pointed)


def _is_building(building: Path, model_name: str) -> bool:
    locks = [(BUILD_DIRECTORY.fullmatch(lock.stem), lock) for lock in building.glob("*.lock")]
    return any(place and place["model"] == model_name and is_locked(lock) for place, lock in locks)


def _is_in_use(version: Path) -> bool:
    return any(is_locked(path) for path in plain_files(version))


def _remove_version(building: Path, item: GarbageItem) -> bool:
    # Held, so that no build of this version points an alias to it meanwhile.
    with try_exclusive_lock(
        lock_path(building / f"{item.path.parent.name}--{item.path.name}")
    ) as free:
        pointed = pointed_versions(item.path.parent)
        is_unpointed = pointed is not None and item.path.name not in pointed
        is_garbage = free and is_unpointed and is_own_directory(item.path)
        if is_garbage:
            remove_atomically(item.path, building)
    return is_garbage


def _remove_build(building: Path, item: GarbageItem) -> bool:
    with try_exclusive_lock(lock_path(item.path)) as free:
        if free and is_own_directory(item.path):
            remove_atomically(item.path, building)
        if free:
            log_path(item.path).unlink(missing_ok=True)
    return free


def _remove_scratch(building: Path, item: GarbageItem) -> bool:
    with directory_lock(building):
        is_abandoned = item.path in find_abandoned_scratch(building)
        if is_abandoned:
            remove_atomically(item.path, building)
    return is_abandoned


def _remove_file(_: Path, item: GarbageItem) -> bool:
    item.path.unlink(missing_ok=True)
    return True


_REMOVE: Mapping[GarbageKind, Callable[[Path, GarbageItem], bool]] = {
    GarbageKind.VERSION: _remove_version,
    GarbageKind.BUILD: _remove_build,
    GarbageKind.SCRATCH: _remove_scratch,
    GarbageKind.FILE: _remove_file,
}
