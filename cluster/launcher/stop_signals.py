"""Signals that stop the launcher: Ctrl-C, SIGTERM and a closed terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A signal that follows sooner is a copy of the first: a process group and `make` both pass one on.
COPY_S = 1.0


class StopSignal(BaseException):
    """A stop signal arrived. Not an Exception, so that `except Exception` does not catch it."""


def list_stop_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP if it is ignored, as after `nohup`."""
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if each is not signal.SIGHUP or not is_detached]


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise StopSignal once on Ctrl-C, SIGTERM or a closed terminal; see `list_stop_signals`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        ignore_stop_signals()
        raise StopSignal

    previous = {number: signal.signal(number, stop) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals, which would interrupt the cleanup."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def count_stop_signals() -> Callable[[], int]:
    """Count further signals by Ctrl-C and SIGTERM from now on, and let none interrupt the cleanup.

    Return a function that returns the count. It leaves out signals within COPY_S.
    """
    began_s, later = time.monotonic(), []

    def count(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - began_s > COPY_S:
            later.append(number)

    ignore_stop_signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, count)
    return lambda: len(later)
