"""Steps of a build: each done once, told on the progress, its noise in the log."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from build_artifacts.progress import Progress, Step
from build_artifacts.storage.workspace import Workspace

# Fills the directory it is given and says in a few words what came out.
StepWork = Callable[[Path], str]


class StepRunner:
    """The one way a build does something that takes time."""

    def __init__(self, place: Workspace, progress: Progress) -> None:
        self._place = place
        self._progress = progress
        self._told: set[str] = set()

    @contextmanager
    def passing(self, name: str, detail: str) -> Iterator[Step]:
        """A step that leaves nothing behind, so an interrupted build does it again."""
        with self._progress.step(name, detail) as step, self._place.quiet():
            yield step

    def once(self, key: str, name: str, detail: str, work: StepWork) -> Path:
        """The directory that `work` filled, now or in a build that was interrupted.

        `key` names the step among all steps of the build.
        """
        is_news = key not in self._told
        self._told.add(key)
        if not self._place.is_done(key):
            with self.passing(name, detail) as step:
                done = self._place.once(key, lambda into: step.found(work(into)))
            _give_back()
            return done
        if is_news:
            with self._progress.step(name, detail) as step:
                step.found("done by an interrupted build")
        return self._place.once(key, _never)


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
