"""Runner of the steps of a build: cached results and progress output."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from build_artifacts.progress import BuildProgress, BuildStep
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.types import Device
from deployments.host.native_heap import return_free_memory
from deployments.tuning.host import free_bytes

# Fills the directory and returns a short description of the result.
StepWork = Callable[[Path], str]


class StepRunner:
    """Runner of the steps of a build, which reports each step as progress."""

    def __init__(self, workspace: Workspace, progress: BuildProgress) -> None:
        self._workspace = workspace
        self._progress = progress
        self._reported: set[str] = set()
        self._has_warned_of_memory = False

    def create_directory(self, name: str) -> Path:
        """Create a directory in the workspace for files of steps that are not cached."""
        path = self._workspace.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def run_uncached(self, name: str, detail: str) -> Iterator[BuildStep]:
        """Run a step without a stored result; a resumed build repeats it."""
        with self._progress.step(name, detail) as step, self._workspace.quiet():
            yield step

    def report(self, text: str) -> None:
        """Print one progress line."""
        self._progress.message(text)

    def warn_of_memory(self, needed_bytes: int) -> None:
        """Report, once, if a step probably needs more memory than is free.

        The system would end the build.
        """
        available_bytes = free_bytes(Device.CPU)
        if needed_bytes > available_bytes and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            self.report(
                f"this build needs about {needed_bytes / 1e9:.1f} GB of memory; "
                f"{available_bytes / 1e9:.1f} GB are free"
            )

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
    return_free_memory()


def _never(_into: Path) -> None:
    raise AssertionError("bug: a finished step was started again")
