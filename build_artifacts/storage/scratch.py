"""Directories of a store that nobody will miss: scratch, and what is on its way out.

They lie in `<store>/.building/`, on the same file system as the versions, so that a rename moves
things there whole. What a killed process left is removed when the next one starts.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from build_artifacts.errors import BuildError
from deployments.locks import directory_held, is_held

BUILDING_NAME = ".building"
# Not the start of a model id, so never that of a build's own directory.
_PREFIX = ".scratch-"


@contextmanager
def scratch(store: Path) -> Iterator[Path]:
    """A fresh directory in `store`, removed on every way out."""
    building = store / BUILDING_NAME
    with ExitStack() as stack:
        with store_errors(store):
            building.mkdir(parents=True, exist_ok=True)
            # Held while starting: until it is locked the new directory looks abandoned.
            with directory_held(building):
                for path in abandoned(building):
                    shutil.rmtree(path, ignore_errors=True)
                root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=building))
                stack.enter_context(directory_held(root))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield root


def abandoned(building: Path) -> list[Path]:
    """Scratch directories of dead processes. Only true while `building` itself is held."""
    found = (path for path in sorted(building.glob(f"{_PREFIX}*")) if not path.is_symlink())
    return [path for path in found if path.is_dir() and not is_held(path)]


def dispose(directory: Path, building: Path) -> None:
    """Remove a directory so that nobody sees half of it: it is renamed away before it is emptied.

    When the process is killed in between, the next `scratch` does the rest. Raises OSError when
    the directory cannot be renamed; then it is untouched.
    """
    away = building / f"{_PREFIX}{uuid.uuid4().hex}"
    directory.rename(away)
    shutil.rmtree(away, ignore_errors=True)


@contextmanager
def store_errors(store: Path, doing: str = "write to") -> Iterator[None]:
    """Say plainly what cannot be done to the store. Raises BuildError for OSError."""
    try:
        yield
    except OSError as exc:
        raise BuildError(
            f"cannot {doing} the store {store}: {exc.strerror or exc}",
            hint="check its space and permissions, or pass another `--store DIR`",
        ) from exc
