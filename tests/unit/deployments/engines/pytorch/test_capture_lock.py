from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from deployments.engines.pytorch.capture_lock import CaptureLock, find_capture_lock
from tests.support.waiting import TIMEOUT_S, wait_for

SHORT_S = 0.05  # long enough for a thread to enter its context if nothing blocks it


class Holder:
    """A thread that enters a context, and leaves it when the test says so."""

    def __init__(
        self, threads: ThreadPoolExecutor, enter: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._entered, self._leaving = threading.Event(), threading.Event()
        self._done: Future[None] = threads.submit(self._hold, enter)

    def _hold(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        with enter():
            self._entered.set()
            assert self._leaving.wait(TIMEOUT_S)

    @property
    def is_waiting(self) -> bool:
        return not self._entered.wait(SHORT_S)

    def wait_until_inside(self) -> None:
        assert self._entered.wait(TIMEOUT_S)

    def leave(self) -> None:
        self._leaving.set()
        self._done.result(TIMEOUT_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_passes_and_openings_run_at_the_same_time(threads: ThreadPoolExecutor) -> None:
    lock = CaptureLock()
    holders = [Holder(threads, enter) for enter in (lock.run_pass, lock.run_pass, lock.open_model)]
    for holder in holders:
        holder.wait_until_inside()
    assert lock.is_opening
    for holder in holders:
        holder.leave()
    assert not lock.is_opening


@pytest.mark.parametrize("use", ["run_pass", "open_model", "capture"])
def test_nothing_starts_during_a_capture(threads: ThreadPoolExecutor, use: str) -> None:
    lock = CaptureLock()
    capture = Holder(threads, lock.capture)
    capture.wait_until_inside()
    other = Holder(threads, getattr(lock, use))
    assert other.is_waiting
    capture.leave()
    other.wait_until_inside()
    other.leave()


def test_capture_that_does_not_wait_gives_way_to_an_opening(threads: ThreadPoolExecutor) -> None:
    lock = CaptureLock()
    opening = Holder(threads, lock.open_model)
    opening.wait_until_inside()
    with lock.capture(waits=False) as is_alone:
        assert not is_alone
        with lock.run_pass():
            pass
    opening.leave()
    with lock.capture(waits=False) as is_alone:
        assert is_alone


def test_capture_waits_for_running_passes_and_keeps_new_ones_back(
    threads: ThreadPoolExecutor,
) -> None:
    """Else a replica whose passes overlap would never capture."""
    lock = CaptureLock()
    running = Holder(threads, lock.run_pass)
    running.wait_until_inside()
    capture = Holder(threads, lock.capture)
    wait_for(lambda: lock._is_captured)
    assert capture.is_waiting
    late = Holder(threads, lock.run_pass)
    assert late.is_waiting
    running.leave()
    capture.wait_until_inside()
    assert late.is_waiting
    capture.leave()
    late.wait_until_inside()
    late.leave()


def test_passes_go_on_while_a_capture_waits_for_an_opening(threads: ThreadPoolExecutor) -> None:
    """An opening takes up to minutes, and the passes of other models must not wait for it."""
    lock = CaptureLock()
    opening = Holder(threads, lock.open_model)
    opening.wait_until_inside()
    capture = Holder(threads, lock.capture)
    assert capture.is_waiting
    for _ in range(3):
        passing = Holder(threads, lock.run_pass)
        passing.wait_until_inside()
        passing.leave()
    opening.leave()
    capture.wait_until_inside()
    capture.leave()


def test_failed_capture_releases_the_lock() -> None:
    lock = CaptureLock()
    with pytest.raises(ZeroDivisionError), lock.capture():
        raise ZeroDivisionError
    with lock.run_pass(), lock.open_model():
        pass
    with lock.capture():
        pass


def test_gpu_engines_share_a_lock_and_cpu_engines_never_wait() -> None:
    assert find_capture_lock(is_gpu=True) is find_capture_lock(is_gpu=True)
    on_cpu = find_capture_lock(is_gpu=False)
    with on_cpu.capture(), on_cpu.open_model(), on_cpu.run_pass(), on_cpu.capture():
        assert not on_cpu.is_opening
