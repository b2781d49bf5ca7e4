"""Fake builder in a thread, which processes the build queue of a store as the compiler does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.builds.process import BUSY
from deployments.builds.queue import BuildClaim, BuildQueue
from deployments.builds.record import BuildState
from tests.support.artifacts import seal_tiny, tiny_manifest
from tests.support.waiting import TIMEOUT_S


class Killed(BaseException):
    """Raised to end the builder in the middle of a build, as if a signal killed it."""


class FakeBuilder:
    """A `StartBuilder` that calls `work` for each build. `work` may raise Killed.

    At the first `busy_starts` starts it builds nothing, as if another process ran the builds.
    """

    def __init__(self, work: Callable[[Path, BuildClaim], None], *, busy_starts: int = 0) -> None:
        self.work = work
        self.busy_starts = busy_starts
        self.starts = 0
        self.builds: list[str] = []

    def __call__(self, store: Path, _max_memory_bytes: int) -> Any:
        self.starts += 1
        queue = BuildQueue(store)
        return _Process(lambda killed: self._drain(queue, killed), queue)

    def _drain(self, queue: BuildQueue, killed: threading.Event) -> int:
        if self.starts <= self.busy_starts:
            return BUSY
        while (pending := queue.pending()) and not killed.is_set():
            with queue.claim(pending[0].id) as claim:
                if claim is not None and killed.is_set() and claim.record.is_running:
                    claim.interrupt()  # the standard input was closed just before the claim
                elif claim is not None:
                    self.builds.append(claim.record.id)
                    self.work(queue.store, claim)
        return 0


class _Process:
    """The part of subprocess.Popen that a server uses."""

    def __init__(self, run: Callable[[threading.Event], int], queue: BuildQueue) -> None:
        self._code: int | None = None
        self._killed = threading.Event()
        self.stdin = _StandardInput(queue, self._killed)
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[threading.Event], int]) -> None:
        try:
            self._code = run(self._killed)
        except Killed:
            self._code = -9

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        self._killed.set()

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        self._thread.join(timeout_s)


class _StandardInput:
    """Standard input of a builder. Closing it interrupts the build, as in the real builder."""

    def __init__(self, queue: BuildQueue, killed: threading.Event) -> None:
        self._queue = queue
        self._killed = killed

    def close(self) -> None:
        self._killed.set()
        self._queue.interrupt()


def seal_at_once(store: Path, claim: BuildClaim) -> None:
    """Enter all states of a build and write an artifact of a tiny embedder."""
    for state in (BuildState.BUILDING, BuildState.VERIFYING):
        claim.enter(state, f"{state} of a test")
    seal_tiny(store, claim.record.id)
    claim.finish(tiny_manifest(claim.record.id).version)


def fail(_store: Path, claim: BuildClaim) -> None:
    claim.fail("`model.safetensors` is corrupt")
