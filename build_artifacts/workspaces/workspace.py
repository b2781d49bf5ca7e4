"""The directory of one build or report: results of finished steps, and the log."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deployments.artifacts.store import log_path

_STEP_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_REPEATED_NAME = "repeated"  # file in the directories of the steps that a resumed build repeats
# bytes; a disk without this much free space counts as full
_PROBE_BYTES = 1 << 20


class Workspace:
    """The private directory of one build or report, and its log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = log_path(root)

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

    def list_repeated(self) -> Iterator[Path]:
        """Yield the directories of the steps that `repeat_when_resumed` marked."""
        for mark in self.root.glob(f"steps/*/{_REPEATED_NAME}"):
            yield mark.parent

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
