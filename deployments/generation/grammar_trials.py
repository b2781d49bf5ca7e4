"""Trials of grammars in a process that can be killed, before a replica compiles them.

llguidance bounds the compilation by fuel, but some grammars spend little of it: a JSON schema with
`multipleOf: 9999991` takes minutes and gigabytes. A compilation cannot be cancelled inside a
process, and a compiled grammar cannot leave its process, so a grammar is compiled twice: first in a
child of limited CPU time and memory, and here only if that succeeds.

One server process per tokenizer opens the tokenizer once, on the first grammar, and forks a child
for every trial, in a few milliseconds. This module imports nothing that starts threads, because the
server forks. The server ends when the replica closes its socket or dies; its children die with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple, NoReturn

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

import deployments
from deployments.errors import EngineFailed, Overloaded

_PACKAGES = Path(deployments.__file__).parents[1]
# s until a trial is given up that gets no CPU time; below HANG_TIMEOUT_S.
WAIT_S = 8.0
# s to wait for the exit of a server after the end of a child: the children of a killed server end
# with it, a moment before its exit is seen.
END_S = 0.05
LENGTH_BYTES = 8
CHUNK_BYTES = 1 << 16
STARTED = b"+"
PR_SET_PDEATHSIG = 1
# A quarter or less of the defaults, because every sequence of a batch waits for a mask. A mask
# takes at most about 5 ms, and a grammar of nested counts about 20 MB and 0.5 s.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    verbose_errors=False,  # verbose errors contain the state of the parser
)


class TrialLimits(NamedTuple):
    """Limits of one compilation."""

    cpu_s: float
    memory_bytes: int
    nice: int = 0


# Nearly all grammars compile in milliseconds. One that exceeds QUICK is tried again with FULL, in a
# thread for such grammars only, so that it delays no quick one.
QUICK = TrialLimits(cpu_s=0.1, memory_bytes=128 << 20)
FULL = TrialLimits(cpu_s=1.0, memory_bytes=128 << 20, nice=10)


class Trial(NamedTuple):
    """Result of a compilation within the limits."""

    error: str | None  # of llguidance; None: the grammar can be used
    memory_bytes: int  # that the compiled grammar takes


def build_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar and compute its first mask; see `is_error` of the result.

    Some errors appear only with the first mask, which is also the slowest by far.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class GrammarTrials:
    """Runs trials for one tokenizer. Thread-safe; trials of several threads run in parallel."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = orjson.dumps((tokenizer_json, eos_token_ids))
        self._process: _TrialProcess | None = None
        self._is_closed = False
        self._lock = Lock()

    def run(self, source: str, limits: TrialLimits) -> Trial | None:
        """Compile `source` in a child; None if it exceeds `limits`.

        Raises Overloaded after WAIT_S, EngineFailed if the server does not start or ends twice.
        """
        request = orjson.dumps((*limits, source))
        for _ in range(2):
            server = self._get_process()
            answer = server.ask(request)
            if len(answer) > len(STARTED):
                return Trial(*orjson.loads(answer.removeprefix(STARTED)))
            if answer and not server.has_ended():
                return None
            self._discard(server)
        raise EngineFailed("the process that compiles grammars ended twice")

    def close(self) -> None:
        """End the server and its children."""
        self._is_closed = True
        if self._process is not None:
            self._discard(self._process)

    def _get_process(self) -> _TrialProcess:
        with self._lock:
            if self._is_closed:
                raise EngineFailed("this replica is stopping")
            if self._process is None:
                self._process = _TrialProcess(self._tokenizer)
            return self._process

    def _discard(self, server: _TrialProcess) -> None:
        with self._lock:
            if self._process is server:
                self._process = None
        server.close()


class _TrialProcess:
    """The replica's end of a server process."""

    def __init__(self, tokenizer: bytes) -> None:
        self._control, child_end = socket.socketpair()
        try:
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    cwd=_PACKAGES,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            self._control.close()
            raise EngineFailed(
                f"the process that compiles grammars does not start: {error.strerror}"
            ) from error
        with suppress(OSError):  # it ended; the first trial notices
            self._control.sendall(len(tokenizer).to_bytes(LENGTH_BYTES) + tokenizer)

    def has_ended(self) -> bool:
        """Whether the server ended with the child of the last trial."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask(self, request: bytes) -> bytes:
        """STARTED and the result of one trial; without result if the child was killed.

        Empty if the server ended before.
        """
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(WAIT_S)
        with parent_end:
            try:
                with child_end:
                    socket.send_fds(self._control, [STARTED], [child_end.fileno()])
                parent_end.sendall(request)
                parent_end.shutdown(socket.SHUT_WR)
                return _read_all(parent_end)
            except TimeoutError as error:
                raise Overloaded(
                    f"the grammar was not compiled within {WAIT_S:g} s: this host is too busy; "
                    "retry later"
                ) from error
            except OSError:
                return b""

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def serve_trials(control: socket.socket) -> None:
    """Fork a child for every socket that arrives over `control`, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the replica, which decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes dead children
    with suppress(OSError):  # on low memory the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    size = int.from_bytes(control.recv(LENGTH_BYTES, socket.MSG_WAITALL))
    text, eos_token_ids = orjson.loads(control.recv(size, socket.MSG_WAITALL))
    tokenizer = LLTokenizer(text, eos_token=eos_token_ids)
    del text
    libc = ctypes.CDLL(None)
    server = os.getpid()
    gc.freeze()  # a collection in a child would copy every page
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, len(STARTED), 1)
        if not descriptors:
            return
        if os.fork() == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                _run_trial(socket.socket(fileno=descriptors[0]), tokenizer)
            os._exit(1)
        os.close(descriptors[0])


def _run_trial(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    """Compile one grammar in this process, which signals of the limits end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        cpu_s, memory_bytes, nice, source = orjson.loads(_read_all(connection))
        size, resident = _read_memory()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes,) * 2)
        os.nice(nice)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance reports failed allocations there
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        connection.sendall(STARTED)
        matcher = build_matcher(tokenizer, source)
        error = matcher.get_error() if matcher.is_error() else None
        connection.sendall(orjson.dumps((error, _read_memory()[1] - resident)))
        os._exit(0)
    finally:
        os._exit(1)


def _read_memory() -> tuple[int, int]:
    """Bytes of address space, and of resident memory without mapped files, of this process."""
    total, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    page = resource.getpagesize()
    return int(total) * page, (int(resident) - int(shared)) * page


def _read_all(connection: socket.socket) -> bytes:
    chunks = []
    while chunk := connection.recv(CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


if __name__ == "__main__":
    serve_trials(socket.socket(fileno=0))
