"""What a person sees while a build runs: a bar on a terminal, one line per step everywhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Never, TextIO


def columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Rows of equal length, the first one being the header; `right` aligns all but column 0."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if TYPE_CHECKING:
    from tqdm import tqdm

_TICK_S = 0.5


class BuildStep:
    """The step under way."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        self.outcome = ""

    def set_outcome(self, outcome: str) -> None:
        """What the finished line will say besides the time."""
        self.outcome = outcome


class BuildProgress:
    """Reports steps on a stream of its own, so that silencing stderr does not silence it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm[Never] | None = None

    @classmethod
    def on_stderr(cls) -> BuildProgress:
        """BuildProgress on a copy of the process's stderr."""
        return cls(os.fdopen(os.dup(2), "w", encoding="utf-8"))

    def message(self, text: str) -> None:
        """One line of its own."""
        self._line(text)

    def begin(self) -> None:
        """Show the step under way, where the stream is a terminal; how many come is not known."""
        if self._stream.isatty():
            from tqdm import tqdm

            form = "{desc:<60} step {n_fmt}, {elapsed}"
            self._bar = tqdm(file=self._stream, leave=False, bar_format=form)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @contextmanager
    def step(self, name: str, detail: str) -> Iterator[BuildStep]:
        """Time a step and write its line, also when it fails."""
        step = BuildStep(name, detail)
        started_s = time.monotonic()
        try:
            with self._ticking(step):
                yield step
        except BaseException:
            step.set_outcome("failed")
            raise
        finally:
            took_s = time.monotonic() - started_s
            told = f": {step.outcome}" if step.outcome else ""
            self._line(f"  {name:<9} {took_s:5.1f} s  {detail}{told}")
            if self._bar is not None:
                self._bar.update()

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    @contextmanager
    def _ticking(self, step: BuildStep) -> Iterator[None]:
        """Keep the bar's clock running; nothing inside a step reports how far it is."""
        bar = self._bar
        if bar is None:
            yield
            return
        bar.set_description_str(f"{step.name} {step.detail}"[:60])
        done = threading.Event()

        def tick() -> None:
            while not done.wait(_TICK_S):
                bar.refresh()

        ticker = threading.Thread(target=tick, name="progress", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
