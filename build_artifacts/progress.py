"""The progress of a build on stderr."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from deployments.terminal.progress_console import ProgressConsole

_REFRESH_HZ = 2.0
_BAR_WIDTH = 10  # characters


def copy_stderr() -> TextIO:
    """Open a copy of stderr, because build steps redirect the original file descriptor."""
    return os.fdopen(os.dup(2), "w", encoding="utf-8")


class BuildStep:
    """The current step of a build; `set_outcome` adds text to its line."""

    def __init__(self) -> None:
        self.outcome = ""

    def set_outcome(self, outcome: str) -> None:
        self.outcome = outcome


class PercentColumn(ProgressColumn):
    """Column with a bar and the percent that `read` returns; empty if the percent is unknown."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        super().__init__()
        self._read = read

    def render(self, task: Task) -> Text:
        percent = self._read()
        if percent is None:
            return Text("")
        filled = percent * _BAR_WIDTH // 100
        return Text(f"{'█' * filled}{'░' * (_BAR_WIDTH - filled)} {percent:3d} %")


class BuildProgress:
    """Progress of a build: a line per finished step; on a terminal also the current step.

    `read_percent` returns the finished share of the build in percent, or None if it is unknown.
    """

    def __init__(
        self, stream: TextIO, read_percent: Callable[[], int | None] = lambda: None
    ) -> None:
        is_terminal = stream.isatty()
        self._console = ProgressConsole(file=stream, force_terminal=is_terminal, color_system=None)
        self._progress = Progress(
            TextColumn("{task.description:<42.42} step {task.completed:.0f},", markup=False),
            TimeElapsedColumn(),
            PercentColumn(read_percent),
            console=self._console,
            refresh_per_second=_REFRESH_HZ,
            transient=True,
            # Commands print results to stdout. Redirection would send them to the progress stream.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not is_terminal,
        )
        self._task = self._progress.add_task("", total=None)
        self._shown = ""

    @classmethod
    @contextmanager
    def on_stderr(cls) -> Iterator[BuildProgress]:
        """Yield progress on a copy of stderr."""
        with copy_stderr() as stream:
            yield cls(stream)

    def message(self, text: str) -> None:
        self._console.out(text, highlight=False)

    def set_source_bytes(self, size: int) -> None:
        """Ignore the size of the fetched source. Subclasses may record it."""

    def begin(self) -> None:
        """Show the current step if the stream is a terminal."""
        self._progress.reset(self._task, total=None)  # the number of steps is unknown
        self._progress.start()

    def end(self) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        """Show a step that another process runs. Without a terminal, write a line per new step."""
        if text == self._shown:
            return
        self._shown = text
        self._progress.update(self._task, description=text, refresh=True)
        if not self._console.is_terminal:
            self.message(f"  {text}")

    @contextmanager
    def step(self, name: str, detail: str) -> Iterator[BuildStep]:
        """Time a step and write its line, even if the step fails."""
        step = BuildStep()
        self._progress.update(self._task, description=f"{name} {detail}", refresh=True)
        started_s = time.monotonic()
        try:
            yield step
        except BaseException:
            step.set_outcome("failed")
            raise
        finally:
            elapsed_s = time.monotonic() - started_s
            outcome = f": {step.outcome}" if step.outcome else ""
            self.message(f"  {name:<9} {elapsed_s:5.1f} s  {detail}{outcome}")
            self._progress.advance(self._task)
