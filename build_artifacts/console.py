"""Terminal output of the compiler: tables as text, and the progress of a build on stderr."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_COLUMN_GAP = 2  # spaces
_UNLIMITED_WIDTH = 1_000_000  # characters; a table never wraps or truncates a cell
_REFRESH_HZ = 2.0


def format_table(rows: Sequence[Sequence[str]], *, align_right: bool = False) -> str:
    """Format rows of equal length, header first; `align_right` aligns all columns but the first."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    for column in range(len(rows[0])):
        table.add_column(justify="right" if align_right and column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=_UNLIMITED_WIDTH, force_terminal=False, legacy_windows=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class BuildStep:
    """The current step of a build; `set_outcome` adds text to its line."""

    def __init__(self) -> None:
        self.outcome = ""

    def set_outcome(self, outcome: str) -> None:
        self.outcome = outcome


class BuildProgress:
    """One line per finished step. A terminal also shows the current step and its elapsed time."""

    def __init__(self, stream: TextIO) -> None:
        is_terminal = stream.isatty()
        self._console = Console(file=stream, force_terminal=is_terminal, color_system=None)
        self._progress = Progress(
            TextColumn("{task.description:<60.60} step {task.completed:.0f},", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=_REFRESH_HZ,
            transient=True,
            # Results go to stdout, never to the stream of the progress.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    @classmethod
    @contextmanager
    def on_stderr(cls) -> Iterator[BuildProgress]:
        """Yield progress on a copy of stderr, because steps silence the file descriptor itself."""
        with os.fdopen(os.dup(2), "w", encoding="utf-8") as stream:
            yield cls(stream)

    def message(self, text: str) -> None:
        self._console.out(text, highlight=False)

    def begin(self) -> None:
        """Show the current step if the stream is a terminal. The number of steps is unknown."""
        self._progress.reset(self._task, total=None)
        self._progress.start()

    def end(self) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, name: str, detail: str) -> Iterator[BuildStep]:
        """Time a step and write its line, also if it fails."""
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
