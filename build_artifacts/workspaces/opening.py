"""Directories of builds in the store: opened, locked, and removed when their builds have ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.progress import BuildProgress
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.locks import directory_lock, exclusive_lock
from deployments.artifacts.store import (
    build_path,
    building_directory,
    create_scratch,
    find_abandoned_scratch,
    find_abandoned_scratch_logs,
    lock_path,
    log_path,
    remove_atomically,
)

_BUILD_INPUTS_NAME = "made-with"


@contextmanager
def open_scratch(store: Path) -> Iterator[Path]:
    """Create an empty directory in `store`; remove it on exit.

    Also remove directories that killed processes created here and left. Raises BuildError if the
    store cannot be written.
    """
    building = building_directory(store)
    with ExitStack() as stack:
        with _as_build_errors(store):
            building.mkdir(parents=True, exist_ok=True)
            # Hold this lock until the new directory is locked. Otherwise another process could
            # remove the directory as abandoned.
            with directory_lock(building):
                for path in find_abandoned_scratch(building):
                    shutil.rmtree(path, ignore_errors=True)
                root = create_scratch(building)
                stack.enter_context(directory_lock(root))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield root


@contextmanager
def open_temporary_workspace(store: Path) -> Iterator[Workspace]:
    """Open a temporary workspace. Remove it on exit.

    After a failure, its log stays until the next temporary workspace is opened.
    """
    with open_scratch(store) as root:
        for log in find_abandoned_scratch_logs(root.parent):
            log.unlink(missing_ok=True)
        place = Workspace(root)
        try:
            yield place
            place.log.unlink(missing_ok=True)
        except Exception:
            place.record_failure()
            raise


@contextmanager
def open_build_workspace(
    store: Path, model_id: str, version: str, progress: BuildProgress, *, build_inputs: str = ""
) -> Iterator[Workspace]:
    """Open the workspace of one version. Report and await another running build of this version.

    During the wait, the other build may publish the version, so callers must check the store again.
    Steps of an interrupted build are reused if its `build_inputs` were equal, except those with the
    mark of `repeat_when_resumed`. Raises BuildError if the store cannot be written.

    After success, and after a BuildError, which would occur again, the steps are removed. After any
    other exception, such as an interruption, they stay. The log stays after every failure.
    """
    root = build_path(store, model_id, version)

    def report_waiting(holder: str) -> None:
        by = f" ({holder})" if holder else ""
        progress.message(f"waiting for another build of {model_id} version {version}{by}")

    with ExitStack() as stack:
        with _as_build_errors(store):
            building_directory(store).mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(lock_path(root), report_waiting))
            place = _enter(root, build_inputs)
        try:
            yield place
        except BuildError:
            place.record_failure()
            _clean_up(root)
            raise
        except Exception:
            place.record_failure()
            raise
        _clean_up(root)
        place.log.unlink(missing_ok=True)


def _enter(root: Path, build_inputs: str) -> Workspace:
    inputs_file = root / _BUILD_INPUTS_NAME
    inputs = build_inputs.encode()
    if root.exists() and (not inputs_file.is_file() or inputs_file.read_bytes() != inputs):
        remove_atomically(root, root.parent)
    if not root.exists():
        log_path(root).unlink(missing_ok=True)
        root.mkdir()
        inputs_file.write_bytes(inputs)
    place = Workspace(root)
    for step in place.list_repeated():
        remove_atomically(step, root.parent)
    return place


def _clean_up(root: Path) -> None:
    with suppress(OSError):  # the build has ended; `hundredfold models gc` removes the rest
        remove_atomically(root, root.parent)


@contextmanager
def _as_build_errors(store: Path) -> Iterator[None]:
    """Convert an OSError to a BuildError that names the store."""
    try:
        yield
    except OSError as exc:
        raise BuildError(
            f"cannot write to the store {store}: {exc.strerror or exc}",
            hint="check its space and permissions, or pass another `--store DIR`",
        ) from exc
