"""What may be removed from a store: versions without an alias, and what builds left behind.

Every plain file in a model's directory that holds a version and nothing else is an alias; `latest`
is one. A version stays, alias or not, while a build of its model is at work, and while any process
holds an exclusive lock on a file in it. Links are neither followed nor removed.

A running server is not disturbed: it read its graphs when it started, and where it starts again it
goes by the aliases. Versions it was told by number only its configuration knows: pass them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.storage.leftovers import (
    PLACE,
    Item,
    Kind,
    dead_scratch,
    is_own_directory,
    measure,
    old_builds,
    plain_files,
    stray_logs,
    temporaries,
)
from build_artifacts.storage.scratch import BUILDING_NAME, abandoned, dispose, store_errors
from build_artifacts.storage.workspace import lock_path, log_path
from deployments.locks import directory_held, held_if_free, is_held
from deployments.store import LATEST_NAME, VERSION

_HEADER = ("WHAT", "NAME", "MB", "WHY")


@dataclass(frozen=True, slots=True)
class Garbage:
    """What `find_garbage` found in `store`, leaving out `keep`."""

    store: Path
    keep: frozenset[str]
    items: tuple[Item, ...]

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
    items: list[Item] = []
    with store_errors(store, "read"):
        for model in _model_directories(store):
            items += _versions(model, kept, building)
            items += temporaries(model, now_s)
        if is_own_directory(building):
            items += old_builds(building, now_s)
            items += stray_logs(building, now_s)
            items += dead_scratch(building)
    return Garbage(store, kept, tuple(items))


def remove(garbage: Garbage) -> tuple[Item, ...]:
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
    order = list(Kind)
    items = sorted(garbage.items, key=lambda item: (order.index(item.kind), -item.size))
    rows = [_HEADER, *((i.kind, i.name, _megabytes(i.size), i.why) for i in items)]
    kind, name, size = (max(len(row[column]) for row in rows) for column in range(3))
    lines = [f"{r[0]:<{kind}}  {r[1]:<{name}}  {r[2]:>{size}}  {r[3]}" for r in rows]
    return "\n".join([*lines, f"{len(items)} to remove, {_megabytes(garbage.size)} MB"])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _model_directories(store: Path) -> Iterator[Path]:
    for path in sorted(store.iterdir()) if store.is_dir() else ():
        if not path.name.startswith(".") and is_own_directory(path):
            yield path


def _versions(model: Path, keep: frozenset[str], building: Path) -> Iterator[Item]:
    pointed = pointed_versions(model)
    if pointed is None or _is_building(building, model.name):
        return
    for path in sorted(model.iterdir()):
        if not VERSION.fullmatch(path.name) or not is_own_directory(path):
            continue
        name = f"{model.name.replace('--', '/')}:{path.name}"
        if path.name not in pointed and name not in keep and not _is_in_use(path):
            yield Item(Kind.VERSION, name, path, measure(path).size, "no alias points to it")


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
    locks = [(PLACE.fullmatch(lock.stem), lock) for lock in building.glob("*.lock")]
    return any(place and place["model"] == model_name and is_held(lock) for place, lock in locks)


def _is_in_use(version: Path) -> bool:
    return any(is_held(path) for path in plain_files(version))


def _remove_version(building: Path, item: Item) -> bool:
    # Held, so that no build of this version points an alias to it meanwhile.
    with held_if_free(lock_path(building / f"{item.path.parent.name}--{item.path.name}")) as free:
        pointed = pointed_versions(item.path.parent)
        is_unpointed = pointed is not None and item.path.name not in pointed
        is_garbage = free and is_unpointed and is_own_directory(item.path)
        if is_garbage:
            dispose(item.path, building)
    return is_garbage


def _remove_build(building: Path, item: Item) -> bool:
    with held_if_free(lock_path(item.path)) as free:
        if free and is_own_directory(item.path):
            dispose(item.path, building)
        if free:
            log_path(item.path).unlink(missing_ok=True)
    return free


def _remove_scratch(building: Path, item: Item) -> bool:
    with directory_held(building):
        is_abandoned = item.path in abandoned(building)
        if is_abandoned:
            dispose(item.path, building)
    return is_abandoned


def _remove_file(_: Path, item: Item) -> bool:
    item.path.unlink(missing_ok=True)
    return True


_REMOVE: Mapping[Kind, Callable[[Path, Item], bool]] = {
    Kind.VERSION: _remove_version,
    Kind.BUILD: _remove_build,
    Kind.SCRATCH: _remove_scratch,
    Kind.FILE: _remove_file,
}
