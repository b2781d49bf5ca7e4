"""Isolation of CUDA graph captures from the other threads of a process.

ONNX Runtime captures with `cudaStreamCaptureModeGlobal`. During the capture, calls of other threads
that allocate memory, copy or wait fail with CUDA error 900, and the capture fails too. torch allows
one capture at a time in a process, and each capture first waits until the device is idle. A capture
therefore runs alone. Forward passes and openings of models may overlap. A thread that holds the
lock must not request it again, because the thread could wait for itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal


class CaptureLock:
    """Lock that a capture holds alone, and that passes and openings share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[Literal["pass", "opening"]] = Counter()
        self._is_captured = False  # True while a capture runs or waits for passes to end

    @property
    def is_opening(self) -> bool:
        """Whether a model is being opened, so that a capture would wait, possibly for minutes."""
        return self._users["opening"] > 0

    def run_pass(self) -> AbstractContextManager[None]:
        """Return a context for calls that take milliseconds, such as a pass or a copy."""
        return self._share("pass")

    def open_model(self) -> AbstractContextManager[None]:
        """Return a context for the opening of a model."""
        return self._share("opening")

    @contextmanager
    def capture(self, *, waits: bool = True) -> Iterator[bool]:
        """Run the block of the `with` statement alone. The variable after `as` is True.

        First wait for other captures and openings to end; passes still start meanwhile. Then let no
        pass or opening start until the block ends, and wait for running passes. If `waits` is False
        and a model is being opened, the variable is False. The block then runs at the same time as
        openings and passes, and must not capture.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_captured and (not waits or not self.is_opening)
            )
            if self.is_opening:
                is_alone = False
            else:
                is_alone = self._is_captured = True
                self._changed.wait_for(lambda: not self._users["pass"])
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._changed:
                    self._is_captured = False
                    self._changed.notify_all()

    @contextmanager
    def _share(self, use: Literal["pass", "opening"]) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_captured)
            self._users[use] += 1
        try:
            yield
        finally:
            with self._changed:
                self._users[use] -= 1
                self._changed.notify_all()


class _NoCaptureLock(CaptureLock):
    """Lock without effect, for engines on the CPU, which capture nothing."""

    def run_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open_model(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def capture(self, *, waits: bool = True) -> Iterator[bool]:
        yield True


_OF_GPU, _OF_CPU = CaptureLock(), _NoCaptureLock()


def find_capture_lock(*, is_gpu: bool) -> CaptureLock:
    """Return the lock of all GPU engines of this process; for the CPU, one without effect."""
    return _OF_GPU if is_gpu else _OF_CPU
