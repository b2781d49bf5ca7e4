"""Workspace and steps of a build: cached results, progress output and the log."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from build_artifacts.errors import BuildError
from build_artifacts.progress import BuildProgress, BuildStep
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


@contextmanager
def scratch(store: Path) -> Iterator[Path]:
    """Create an empty directory in `store`; remove it on exit.

    Also remove directories that killed processes created here and left. Raises BuildError if the
    store cannot be written.
    """
    building = building_directory(store)
    with ExitStack() as stack:
        with as_build_errors(store):
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
def as_build_errors(store: Path) -> Iterator[None]:
    """Convert an OSError to a BuildError that names the store."""
    try:
        yield
    except OSError as exc:
        raise BuildError(
            f"cannot write to the store {store}: {exc.strerror or exc}",
            hint="check its space and permissions, or pass another `--store DIR`",
        ) from exc


_STEP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_BUILD_INPUTS_NAME = "made-with"
_REPEATED_NAME = "repeated"  # file in the directories of the steps that a resumed build repeats
# bytes; a disk without this much free space counts as full
_PROBE_BYTES = 1 << 20


class Workspace:
    """The private directory of one build or report, and its log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = log_path(root)

    def directory(self, name: str) -> Path:
        """Create and return the directory for the files of one step."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_done(self, name: str) -> bool:
        """Return whether this build or an interrupted build finished the step."""
        return self._step(name).is_dir()

    def run_cached(self, name: str, work: Callable[[Path], None]) -> Path:
        """Return the directory that `work` filled, in this or in an interrupted build.

        `work` receives an empty directory that is renamed afterwards, so files must not contain its
        path. If `work` raises an exception, the directory is removed. If the disk is full, an
        OSError replaces the exception.
        """
        done = self._step(name)
        if done.is_dir():
            return done
        partial = done.with_name(f"{name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        try:
            self._do(work, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(done)
        _sync(done.parent)
        return done

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Redirect stdout and stderr to the log, including the output of C++ libraries."""
        with self.log.open("ab") as log, _redirected(log.fileno(), (1, 2)):
            yield

    def record_failure(self) -> None:
        """Append the traceback of the exception being handled to the log."""
        # A full disk may prevent this log entry. Its error must not hide the exception itself.
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)

    def _step(self, name: str) -> Path:
        assert _STEP_NAME.fullmatch(name), f"bug: invalid step name `{name}`"
        return self.root / "steps" / name

    def _do(self, work: Callable[[Path], None], partial: Path) -> None:
        try:
            work(partial)
            _sync_tree(partial)
        except OSError:
            raise
        except Exception as exc:
            # Libraries report a full disk with other exceptions.
            if _is_full(partial):
                reason = os.strerror(errno.ENOSPC)
                raise OSError(errno.ENOSPC, reason, str(partial)) from exc
            raise


def repeat_when_resumed(step: Path) -> None:
    """Mark the directory of a step, so that a resumed build runs the step again.

    Within the current build, the result of the step is kept.
    """
    (step / _REPEATED_NAME).touch()


@contextmanager
def build_workspace(
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
        with as_build_errors(store):
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
    for mark in root.glob(f"steps/*/{_REPEATED_NAME}"):
        remove_atomically(mark.parent, root.parent)
    return Workspace(root)


def _clean_up(root: Path) -> None:
    with suppress(OSError):  # the build has ended; `hundredfold models gc` removes the rest
        remove_atomically(root, root.parent)


@contextmanager
def workspace(store: Path) -> Iterator[Workspace]:
    """Open a temporary workspace. Remove it on exit.

    After a failure, its log stays until the next temporary workspace is opened.
    """
    with scratch(store) as root:
        for log in find_abandoned_scratch_logs(root.parent):
            log.unlink(missing_ok=True)
        place = Workspace(root)
        try:
            yield place
            place.log.unlink(missing_ok=True)
        except Exception:
            place.record_failure()
            raise


def _sync_tree(directory: Path) -> None:
    """Flush a step to the disk, so that a power failure leaves it complete or absent."""
    for top, _, names in os.walk(directory):
        for path in (Path(top, name) for name in names):
            if not path.is_symlink():
                _sync(path)
        _sync(Path(top))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_full(directory: Path) -> bool:
    probe = directory / ".probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as exc:
        return exc.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        probe.unlink(missing_ok=True)
    return False


@contextmanager
def _redirected(target: int, descriptors: tuple[int, ...]) -> Iterator[None]:
    _flush()  # write buffered output before the descriptors change
    saved = [os.dup(descriptor) for descriptor in descriptors]
    try:
        for descriptor in descriptors:
            os.dup2(target, descriptor)
        try:
            yield
        finally:
            _flush()
    finally:
        for copy, descriptor in zip(saved, descriptors, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# Fills the directory and returns a short description of the result.
StepWork = Callable[[Path], str]


class StepRunner:
    """Runner of the steps of a build, which reports each step as progress."""

    def __init__(self, workspace: Workspace, progress: BuildProgress) -> None:
        self._workspace = workspace
        self._progress = progress
        self._reported: set[str] = set()

    @contextmanager
    def run_uncached(self, name: str, detail: str) -> Iterator[BuildStep]:
        """Run a step without a stored result; a resumed build repeats it."""
        with self._progress.step(name, detail) as step, self._workspace.quiet():
            yield step

    def report(self, text: str) -> None:
        """Print one progress line."""
        self._progress.message(text)

    def report_skipped(self, label: str, reason: str) -> None:
        with self.run_uncached("skip", label) as step:
            step.set_outcome(reason)

    def run_cached(self, key: str, name: str, detail: str, work: StepWork) -> Path:
        """Return the directory that `work` filled, in this or in an interrupted build.

        Calls with an equal `key` share one directory.
        """
        is_first_report = key not in self._reported
        self._reported.add(key)
        if not self._workspace.is_done(key):
            with self.run_uncached(name, detail) as step:
                done = self._workspace.run_cached(key, lambda into: step.set_outcome(work(into)))
            _release_memory()
            return done
        if is_first_report:
            with self._progress.step(name, detail) as step:
                step.set_outcome("done by an interrupted build")
        return self._workspace.run_cached(key, _never)


def _release_memory() -> None:
    """Return freed memory to the system; after a large model, malloc holds gigabytes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _never(_into: Path) -> None:
    raise AssertionError("bug: a finished step was started again")


def megabytes(*paths: Path) -> str:
    """Format the total size of the files in MB."""
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def describe_search_timeout(seconds: float) -> str:
    """Return the reason why a candidate is skipped after the search time."""
    return f"the search time of {seconds:.0f} s is over"
