"""Garbage collection of a store: versions without a name, and remains of builds and writes.

The plan (`plan.json` of the store) and aliases name versions. An alias is a plain file in a model's
directory, such as `latest`, that contains only a version. A version stays in these cases:

- An alias, the plan or the configuration of a server names it, or the argument `keep` contains it.
- An alias of its model cannot be read.
- A rollback would return to it. If no version was promoted, a rollback returns to the version
  before the latest.
- A build of its model runs.
- A process holds an exclusive lock on one of its files.

Links are neither followed nor removed. Replicas keep the models that they have loaded. In this
module, `configured` maps model ids to the versions that the configuration names.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deployments.artifacts.locks import directory_lock, is_locked, try_exclusive_lock
from deployments.artifacts.store import (
    VERSION,
    build_path,
    building_directory,
    find_abandoned_scratch,
    is_being_built,
    list_builds,
    list_logs_without_version,
    list_model_directories,
    list_version_directories,
    lock_path,
    log_path,
    name_artifact,
    read_aliased_versions,
    read_model_id,
    remove_atomically,
    store_errors,
)
from deployments.builds.queue import QUEUE_NAME
from deployments.errors import ArtifactError, BadSetting, UnknownModel
from deployments.files import TEMPORARY_FILE
from deployments.plan.plan import Plan
from deployments.plan.plan_file import plan_lock, read_plan
from deployments.plan.resolution import (
    NO_VERSIONS,
    SEPARATOR,
    list_answering,
    list_rollback_versions,
    resolve_selector,
    split_name,
)
from deployments.terminal.console import format_table

ABANDONED_AFTER_S = 7 * 86_400.0
# Minimum age of an abandoned temporary file. Writers rename a file within milliseconds.
TEMPORARY_AFTER_S = 3_600.0


class GarbageKind(StrEnum):
    VERSION = "version"
    BUILD = "build"  # an unfinished build, or the log of a failed one
    SCRATCH = "scratch"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class GarbageItem:
    """One removable version, build, directory or file."""

    kind: GarbageKind
    name: str  # `id@version` for versions and builds
    path: Path
    size: int  # bytes
    reason: str


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Size and age of files and directories."""

    size: int  # bytes of the plain files
    changed_s: float  # last change of any file or directory, seconds since the epoch


def old_builds(building: Path, now_s: float) -> Iterator[GarbageItem]:
    """Yield builds that no process runs and that have not changed for ABANDONED_AFTER_S."""
    for root, model_id, version in list_builds(building):
        if is_locked(lock_path(root)):
            continue
        usage = measure(root, log_path(root), lock_path(root))
        age_s = now_s - usage.changed_s
        if age_s > ABANDONED_AFTER_S:
            state = "unfinished" if root.is_dir() else "left by a failure"
            ref = f"{model_id}{SEPARATOR}{version}"
            reason = f"{state}, {age_s / 86_400:.0f} days old"
            yield GarbageItem(GarbageKind.BUILD, ref, root, usage.size, reason)


def orphan_logs(building: Path, now_s: float) -> Iterator[GarbageItem]:
    """Yield logs that belong to no version and have not changed for ABANDONED_AFTER_S."""
    for path in list_logs_without_version(building):
        usage = measure(path)
        if now_s - usage.changed_s > ABANDONED_AFTER_S:
            yield GarbageItem(
                GarbageKind.FILE, path.name, path, usage.size, "a log without a build"
            )


def abandoned_scratch(building: Path) -> list[GarbageItem]:
    """Return scratch directories whose process has ended."""
    with directory_lock(building):
        paths = find_abandoned_scratch(building)
    reason = "left by a process that was killed"
    return [
        GarbageItem(GarbageKind.SCRATCH, path.name, path, measure(path).size, reason)
        for path in paths
    ]


def temporary_files(store: Path, now_s: float) -> Iterator[GarbageItem]:
    """Yield files of interrupted writes that have not changed for TEMPORARY_AFTER_S.

    Such files are next to the plan, in the build queue and in the directories of models.
    """
    queue = store / QUEUE_NAME
    paths = itertools.chain(
        store.glob(".*"),
        queue.glob(".*") if is_own_directory(queue) else (),
        *map(_below, filter(is_own_directory, list_model_directories(store))),
    )
    for path in paths:
        if not (TEMPORARY_FILE.fullmatch(path.name) and is_own_file(path)):
            continue
        usage = measure(path)
        if now_s - usage.changed_s > TEMPORARY_AFTER_S:
            name = path.relative_to(store).as_posix()
            reason = "half-written by a process that was killed"
            yield GarbageItem(GarbageKind.FILE, name, path, usage.size, reason)


def is_own_directory(path: Path) -> bool:
    """Return whether `path` is a directory and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_own_file(path: Path) -> bool:
    """Return whether `path` is a plain file and not a link to one."""
    return path.is_file() and not path.is_symlink()


def plain_files(directory: Path) -> Iterator[Path]:
    """Yield every file below `directory`; links are neither returned nor followed."""
    return filter(is_own_file, _below(directory))


def measure(*roots: Path) -> DiskUsage:
    """Sum up files and directory trees.

    If no root exists, `changed_s` is infinite, so that the roots never count as old.
    """
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
    """Removable items of `store`, without the versions in `keep`."""

    store: Path
    keep: frozenset[str]
    configured: Mapping[str, str]
    items: tuple[GarbageItem, ...]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


def find_garbage(
    store: Path, keep: Collection[str] = (), configured: Mapping[str, str] = NO_VERSIONS
) -> Garbage:
    """Find everything removable, except the versions in `keep`: `id@version` or `id@alias`.

    Raises PlanUnusable if the plan is unreadable or invalid. Raises BadSetting if an item of `keep`
    names no version, UnknownModel if it names an unknown alias, StoreNotWritable if the store
    cannot be read.
    """
    now_s, building = time.time(), building_directory(store)
    items: list[GarbageItem] = []
    with store_errors(store, "read"):
        plan = read_plan(store)
        retained = frozenset(_resolve_kept(store, plan, name) for name in keep)
        for model in filter(is_own_directory, list_model_directories(store)):
            planned = _planned_versions(plan, model, configured)
            items += _versions(model, retained, planned)
        items += temporary_files(store, now_s)
        if is_own_directory(building):
            items += old_builds(building, now_s)
            items += orphan_logs(building, now_s)
            items += abandoned_scratch(building)
    return Garbage(store, retained, configured, tuple(items))


def _resolve_kept(store: Path, plan: Plan, name: str) -> str:
    """Return `id@version` for a name in `keep`. An alias must exist, a version need not exist."""
    model_id, selector = split_name(name)
    if not selector:
        raise BadSetting(f"`{name}` names no version; write `ID@VERSION`")
    if VERSION.fullmatch(selector):
        return name
    version = resolve_selector(store, plan.find(model_id), model_id, selector)
    return f"{model_id}@{version}"


def remove(garbage: Garbage) -> tuple[GarbageItem, ...]:
    """Remove the items that are still garbage and return the removed ones.

    Search the store again first, because an alias may have moved since the first search. Raises
    PlanUnusable if the plan is unreadable or invalid, StoreNotWritable if the store cannot be read
    or changed.
    """
    store = garbage.store
    again = find_garbage(store, garbage.keep, garbage.configured)
    current = {(item.kind, item.path) for item in again.items}
    removable = [item for item in garbage.items if (item.kind, item.path) in current]
    with store_errors(store, "clean"):
        if removable:
            building_directory(store).mkdir(exist_ok=True)
        return tuple(item for item in removable if _REMOVE[item.kind](garbage, item))


def describe(garbage: Garbage) -> str:
    """Format the items in columns, the largest of each kind first, with their total size."""
    if not garbage.items:
        return f"nothing to remove from {garbage.store}"
    order = list(GarbageKind)
    items = sorted(garbage.items, key=lambda item: (order.index(item.kind), -item.size))
    rows = [_HEADER, *((i.kind, i.name, _megabytes(i.size), i.reason) for i in items)]
    table = format_table(rows, align_right=(2,))
    return f"{table}\n{len(items)} to remove, {_megabytes(garbage.size)} MB"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _planned_versions(plan: Plan, model: Path, configured: Mapping[str, str]) -> frozenset[str]:
    """Return the versions that answer requests, or that the plan or the configuration names.

    The result includes the version to which `rollback` would return. If the default version is
    missing or cannot be determined, the result includes all versions: an operator must decide which
    of them answers.
    """
    model_id = read_model_id(model)
    entry = plan.find(model_id)
    try:
        answering = list_answering(model.parent, plan, model_id, configured)
        former = list_rollback_versions(model.parent, model_id, entry, configured)
    except (ArtifactError, UnknownModel):
        return frozenset(path.name for path in list_version_directories(model))
    named = {configured[model_id]} if model_id in configured else set()
    return entry.versions().union(answering, named, former[:1])


def _versions(model: Path, keep: frozenset[str], planned: frozenset[str]) -> Iterator[GarbageItem]:
    aliased = read_aliased_versions(model)
    if aliased is None or is_being_built(model.parent, read_model_id(model)):
        return
    for path in filter(is_own_directory, list_version_directories(model)):
        name = name_artifact(path)
        is_kept = path.name in aliased | planned or name in keep
        if not is_kept and not _is_in_use(path):
            yield GarbageItem(
                GarbageKind.VERSION, name, path, measure(path).size, "nothing names it"
            )


def _is_in_use(version: Path) -> bool:
    return any(is_locked(path) for path in plain_files(version))


def _remove_version(garbage: Garbage, item: GarbageItem) -> bool:
    store, model = garbage.store, item.path.parent
    build = build_path(store, read_model_id(model), item.path.name)
    # With the lock held, no build of this version can set an alias to it.
    # With the lock on the plan, no operator can promote it.
    with try_exclusive_lock(lock_path(build)) as free, plan_lock(store):
        planned = _planned_versions(read_plan(store), model, garbage.configured)
        aliased = None if item.path.name in planned else read_aliased_versions(model)
        has_no_alias = aliased is not None and item.path.name not in aliased
        is_garbage = free and has_no_alias and is_own_directory(item.path)
        if is_garbage:
            remove_atomically(item.path, building_directory(store))
    return is_garbage


def _remove_build(garbage: Garbage, item: GarbageItem) -> bool:
    with try_exclusive_lock(lock_path(item.path)) as free:
        if free and is_own_directory(item.path):
            remove_atomically(item.path, building_directory(garbage.store))
        if free:
            log_path(item.path).unlink(missing_ok=True)
    return free


def _remove_scratch(garbage: Garbage, item: GarbageItem) -> bool:
    building = building_directory(garbage.store)
    with directory_lock(building):
        is_abandoned = item.path in find_abandoned_scratch(building)
        if is_abandoned:
            remove_atomically(item.path, building)
    return is_abandoned


def _remove_file(_: Garbage, item: GarbageItem) -> bool:
    item.path.unlink(missing_ok=True)
    return True


_REMOVE: Mapping[GarbageKind, Callable[[Garbage, GarbageItem], bool]] = {
    GarbageKind.VERSION: _remove_version,
    GarbageKind.BUILD: _remove_build,
    GarbageKind.SCRATCH: _remove_scratch,
    GarbageKind.FILE: _remove_file,
}
