"""ONNX Runtime sessions that act as CUDA sessions but compute on the CPU.

Each session records its calls: the CUDA graph, the thread, and how the capture lock was held.
Engines with these sessions run their code for GPUs on hosts without a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnxruntime as ort

from deployments.engines.onnx.sessions import UNCAPTURED
from deployments.engines.pytorch.capture_lock import CaptureLock
from deployments.errors import EngineFailed

CUDA = "CUDAExecutionProvider"
FREE = "free"  # the lock is not held


class SessionCall(NamedTuple):
    graph: str  # UNCAPTURED, or the id of the CUDA graph that the call captures or replays
    held: str  # "pass", "opening", "capture" or FREE
    thread: int


class RecordedLock(CaptureLock):
    """Capture lock that records for which use the current thread holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._held = threading.local()

    @property
    def held(self) -> str:
        return getattr(self._held, "use", FREE)

    @contextmanager
    def capture(self, *, waits: bool = True) -> Iterator[bool]:
        with super().capture(waits=waits) as is_alone, self._holding("capture"):
            yield is_alone

    @contextmanager
    def _share(self, use: Any) -> Iterator[None]:
        with super()._share(use), self._holding(use):
            yield

    @contextmanager
    def _holding(self, use: str) -> Iterator[None]:
        assert self.held == FREE, "a lock that is held twice can block its own thread"
        self._held.use = use
        try:
            yield
        finally:
            self._held.use = FREE


@dataclass
class FakeCuda:
    """A fake of CUDA for the engines of one test."""

    lock: RecordedLock = field(default_factory=RecordedLock)
    refuses_captures: bool = False  # as CUDA does for graphs with an operator on the host
    is_reported: bool = False  # whether sessions list the provider CUDA
    has_memory: bool = True  # without memory all calls with IO binding fail
    modes: list[str] = field(default_factory=list)  # mode of each requested session
    openings: list[SessionCall] = field(default_factory=list)
    sessions: list[weakref.ref[RecordedSession]] = field(default_factory=list)
    calls: list[SessionCall] = field(default_factory=list)
    shrunk: list[str] = field(default_factory=list)  # arenas of each call that shrinks arenas

    def open(self, session: ort.InferenceSession, mode: str) -> Any:
        """Wrap a session of the CPU. With `refuses_captures` raise EngineFailed for captures."""
        self.modes.append(mode)
        self.openings.append(self._note(UNCAPTURED))
        if mode == "captured" and self.refuses_captures:
            raise EngineFailed("this graph has an operator on the host")
        recorded = RecordedSession(session, self)
        self.sessions.append(weakref.ref(recorded))
        return recorded

    def note_call(self, options: ort.RunOptions | None) -> None:
        self.calls.append(self._note(_read_entry(options, "gpu_graph_id", UNCAPTURED)))
        if arenas := _read_entry(options, "memory.enable_memory_arena_shrinkage"):
            self.shrunk.append(arenas)

    def _note(self, graph: str) -> SessionCall:
        return SessionCall(graph, self.lock.held, threading.get_ident())

    def threads(self) -> set[int]:
        return {call.thread for call in (*self.openings, *self.calls)}

    def captures(self) -> list[SessionCall]:
        """Return the first call of each CUDA graph."""
        first: dict[str, SessionCall] = {}
        for call in self.calls:
            if call.graph != UNCAPTURED:
                first.setdefault(call.graph, call)
        return list(first.values())


def _read_entry(options: ort.RunOptions | None, name: str, default: str = "") -> str:
    """Return an entry of run options, or `default` if ONNX Runtime raises for a missing entry."""
    with suppress(RuntimeError):
        return default if options is None else str(options.get_run_config_entry(name))
    return default


class RecordedSession:
    """A session of the CPU whose calls are recorded."""

    def __init__(self, session: ort.InferenceSession, cuda: FakeCuda) -> None:
        self._session = session
        self._cuda = cuda

    def run(self, names: Any, feeds: Any, options: ort.RunOptions | None = None) -> Any:
        self._cuda.note_call(options)
        return self._session.run(names, feeds)

    def run_with_iobinding(self, binding: Any, options: ort.RunOptions) -> None:
        self._cuda.note_call(options)
        if not self._cuda.has_memory:
            raise RuntimeError("out of memory")
        self._session.run_with_iobinding(binding)

    def get_providers(self) -> list[str]:
        providers: list[str] = self._session.get_providers()
        return [CUDA, *providers] if self._cuda.is_reported else providers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
