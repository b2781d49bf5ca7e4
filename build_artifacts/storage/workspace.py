"""Steps of a build: each done once, told on the progress, its noise in the log."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from build_artifacts.console import BuildProgress, BuildStep
from build_artifacts.errors import BuildError
from deployments.artifacts.locks import directory_lock, exclusive_lock
from deployments.artifacts.store import (
    BUILDING_NAME,
    SCRATCH_PREFIX,
    build_path,
    find_abandoned_scratch,
    lock_path,
    log_path,
    remove_atomically,
)


@contextmanager
def scratch(store: Path) -> Iterator[Path]:
    """A fresh directory in `store`, removed on every way out."""
    building = store / BUILDING_NAME
    with ExitStack() as stack:
        with store_errors(store):
            building.mkdir(parents=True, exist_ok=True)
            # Held while starting: until it is locked the new directory looks abandoned.
            with directory_lock(building):
                for path in find_abandoned_scratch(building):
                    shutil.rmtree(path, ignore_errors=True)
                root = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=building))
                stack.enter_context(directory_lock(root))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        yield root


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


_STEP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_MADE_WITH_NAME = "made-with"
# Enough that a disk without room for it counts as full.
_PROBE_BYTES = 1 << 20


class Workspace:
    """The private directory of one build. Made by `build_workspace`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = log_path(root)

    def directory(self, name: str) -> Path:
        """An existing directory for one step's files."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_done(self, name: str) -> bool:
        """Whether the step `name` is finished, by this build or by one that was interrupted."""
        return self._step(name).is_dir()

    def run_cached(self, name: str, work: Callable[[Path], None]) -> Path:
        """The directory that `work` filled, now or in a build that was interrupted.

        `work` gets an empty directory, which is renamed when it returns: what it writes must not
        name its own place. When it raises, nothing is kept of the step; where the disk is full by
        then, that is what is raised (OSError), whatever `work` made of it.
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
        """Send everything written to stdout and stderr, C++ libraries included, to the log."""
        with self.log.open("ab") as log, _redirected(log.fileno(), (1, 2)):
            yield

    def record_failure(self) -> None:
        """Append the traceback of the exception being handled to the log."""
        # On a full disk there may be no room for it, and the exception itself matters more.
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)

    def _step(self, name: str) -> Path:
        assert _STEP_NAME.fullmatch(name), f"`{name}` names no step; this is a bug"
        return self.root / "steps" / name

    def _do(self, work: Callable[[Path], None], partial: Path) -> None:
        try:
            work(partial)
            _sync_tree(partial)
        except OSError:
            raise
        except Exception as exc:
            # Libraries hide a full disk in exceptions of their own.
            if _is_full(partial):
                reason = os.strerror(errno.ENOSPC)
                raise OSError(errno.ENOSPC, reason, str(partial)) from exc
            raise


@contextmanager
def build_workspace(
    store: Path, model_id: str, version: str, progress: BuildProgress, *, build_inputs: str = ""
) -> Iterator[Workspace]:
    """The workspace of one version, for one build at a time: another one waits and says so.

    Who waited may find the version published when it enters. Steps of an interrupted build are
    still there, unless they were made with something else than `build_inputs` says.

    A build that ends well, or with a BuildError, which the next run would meet again, leaves no
    steps; after everything else they stay. The log stays after every failure.
    """
    building = store / BUILDING_NAME
    root = build_path(store, model_id, version)

    def tell(holder: str) -> None:
        by = f" ({holder})" if holder else ""
        progress.message(f"waiting for another build of {model_id} version {version}{by}")

    with ExitStack() as stack:
        with store_errors(store):
            building.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(lock_path(root), tell))
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
    note = root / _MADE_WITH_NAME
    wanted = build_inputs.encode()
    if root.exists() and (not note.is_file() or note.read_bytes() != wanted):
        remove_atomically(root, root.parent)
    if not root.exists():
        log_path(root).unlink(missing_ok=True)
        root.mkdir()
        note.write_bytes(wanted)
    return Workspace(root)


def _clean_up(root: Path) -> None:
    with suppress(OSError):  # the build is over either way; `gc` finds what could not be removed
        remove_atomically(root, root.parent)


@contextmanager
def workspace(store: Path) -> Iterator[Workspace]:
    """A workspace without a name, removed on every way out, its log only on success."""
    with scratch(store) as root:
        for log in root.parent.glob(f"{SCRATCH_PREFIX}*.log"):
            if not log.with_suffix("").exists():
                log.unlink(missing_ok=True)
        place = Workspace(root)
        try:
            yield place
            place.log.unlink(missing_ok=True)
        except Exception:
            place.record_failure()
            raise


def _sync_tree(directory: Path) -> None:
    """A step that is there after a power failure must be there whole."""
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
    _flush()  # what was said before belongs where it was said
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


# Fills the directory it is given and says in a few words what came out.
StepWork = Callable[[Path], str]


class StepRunner:
    """The one way a build does something that takes time."""

    def __init__(self, place: Workspace, progress: BuildProgress) -> None:
        self._place = place
        self._progress = progress
        self._told: set[str] = set()

    @contextmanager
    def run_uncached(self, name: str, detail: str) -> Iterator[BuildStep]:
        """A step that leaves nothing behind, so an interrupted build does it again."""
        with self._progress.step(name, detail) as step, self._place.quiet():
            yield step

    def report(self, text: str) -> None:
        """Print one progress line."""
        self._progress.message(text)

    def report_skipped(self, label: str, reason: str) -> None:
        with self.run_uncached("skip", label) as step:
            step.set_outcome(reason)

    def run_cached(self, key: str, name: str, detail: str, work: StepWork) -> Path:
        """The directory that `work` filled, now or in a build that was interrupted.

        `key` names the step among all steps of the build.
        """
        is_news = key not in self._told
        self._told.add(key)
        if not self._place.is_done(key):
            with self.run_uncached(name, detail) as step:
                done = self._place.run_cached(key, lambda into: step.set_outcome(work(into)))
            _give_back()
            return done
        if is_news:
            with self._progress.step(name, detail) as step:
                step.set_outcome("done by an interrupted build")
        return self._place.run_cached(key, _never)


def _give_back() -> None:
    """Return freed memory to the system: a step of a large model leaves gigabytes with malloc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def _never(_into: Path) -> None:
    raise AssertionError("a finished step was started again; this is a bug")


def megabytes(path: Path) -> str:
    """The size of a file in words."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def time_over(seconds: float) -> str:
    """The reason why a candidate is skipped after the search time."""
    return f"the search time of {seconds:.0f} s is over"
