"""Trials of grammars in a process that can be killed, before a replica compiles them.

llguidance bounds a compilation by a counter, its fuel. Some grammars use little fuel but much time:
a JSON schema with `multipleOf: 9999991` takes minutes and gigabytes. A process cannot cancel a
compilation, and cannot send a compiled grammar to another process. A grammar is therefore compiled
twice: first in a child with limited CPU time and memory, then in the replica if the child succeeds.

One server process per tokenizer opens the tokenizer once, on the first grammar. It forks a child
for every trial; a fork takes a few milliseconds. This module imports nothing that starts threads,
because a forked child has the locks of other threads but not the threads. The server ends when the
replica ends or closes the control socket. The children end with the server.
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
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple, NoReturn

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from deployments.errors import EngineFailed, Overloaded
from deployments.host.background_process import PACKAGES

# Maximum duration of a trial in seconds, in case it gets no CPU time. It is less than
# HANG_TIMEOUT_S (health.py), after which a call counts as hanging.
WAIT_S = 8.0
# Seconds to wait for the exit of a server after the end of a child. If the server was killed, its
# children end at the same time, but its exit is visible a moment later.
END_S = 0.05
LENGTH_BYTES = 8
CHUNK_BYTES = 1 << 16
STARTED = b"+"  # first byte of an answer, sent before the compilation
PR_SET_PDEATHSIG = 1
# Less than half of the defaults of llguidance, because every sequence of a batch waits for each
# mask. With these limits a mask takes at most about 5 ms. Compiling a grammar of nested counts
# takes about 20 MB and 0.5 s.
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
    nice: int = 0  # added to the niceness of the child


# Nearly all grammars compile in milliseconds. A grammar that exceeds QUICK is tried again with
# FULL. A separate thread does this, so that slow grammars do not delay quick ones.
QUICK = TrialLimits(cpu_s=0.1, memory_bytes=128 << 20)
FULL = TrialLimits(cpu_s=1.0, memory_bytes=128 << 20, nice=10)


class Trial(NamedTuple):
    """Result of a compilation within the limits."""

    error: str | None  # message of llguidance; None: the grammar can be used
    memory_bytes: int  # memory that the compiled grammar takes


def build_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar and compute its first mask. After a failure, `is_error()` is true.

    Some errors appear only with the first mask, which is also by far the slowest mask.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class GrammarTrials:
    """Trials for one tokenizer. Thread-safe; trials of several threads run in parallel."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = orjson.dumps((tokenizer_json, eos_token_ids))
        self._process: _TrialProcess | None = None
        self._is_closed = False
        self._lock = Lock()

    def run(self, source: str, limits: TrialLimits) -> Trial | None:
        """Compile `source` in a child. Return None if the compilation exceeds `limits`.

        Raises Overloaded after WAIT_S. Raises EngineFailed after `close`, if the server does not
        start, or if two tries fail because the server or a child ends.
        """
        request = orjson.dumps((*limits, source))
        deadline_s = time.monotonic() + WAIT_S
        for _ in range(2):
            server = self._get_process()
            answer = server.ask(request, deadline_s)
            if len(answer) > len(STARTED):
                return Trial(*orjson.loads(answer.removeprefix(STARTED)))
            if answer and not server.has_ended():
                return None
            self._discard(server)
        raise EngineFailed("the process that compiles grammars ended twice")

    def close(self) -> None:
        """End the server and its children."""
        with self._lock:  # wait for a server that starts
            self._is_closed, server = True, self._process
        if server is not None:
            self._discard(server)

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
    """The replica's handle on a server process that runs trials."""

    def __init__(self, tokenizer: bytes) -> None:
        self._control, child_end = socket.socketpair()
        try:
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    cwd=PACKAGES,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            self._control.close()
            raise EngineFailed(
                f"the process that compiles grammars does not start: {error.strerror}"
            ) from error
        with suppress(OSError):  # the server has ended, which the first trial detects
            self._control.sendall(len(tokenizer).to_bytes(LENGTH_BYTES) + tokenizer)

    def has_ended(self) -> bool:
        """Return whether the server ended; False if only the child of the last trial ended."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask(self, request: bytes, deadline_s: float) -> bytes:
        """Run one trial. Return STARTED and the result, or only STARTED if the child was killed.

        Returns empty bytes if the server or the child ended before the trial started. Raises
        Overloaded after `deadline_s` of the monotonic clock.
        """
        parent_end, child_end = socket.socketpair()
        with parent_end:
            try:
                with child_end:
                    socket.send_fds(self._control, [STARTED], [child_end.fileno()])
                _set_timeout(parent_end, deadline_s)
                parent_end.sendall(request)
                parent_end.shutdown(socket.SHUT_WR)
                return _read_all(parent_end, deadline_s)
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
    """Fork a child for every socket that arrives over `control`.

    Return when the replica closes `control`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the replica ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes dead children
    with suppress(OSError):
        # If memory runs out, the kernel kills the process with the highest score: a trial instead
        # of the replica.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    size = int.from_bytes(control.recv(LENGTH_BYTES, socket.MSG_WAITALL))
    text, eos_token_ids = orjson.loads(control.recv(size, socket.MSG_WAITALL))
    tokenizer = LLTokenizer(text, eos_token=eos_token_ids)
    del text
    libc = ctypes.CDLL(None)
    server = os.getpid()
    gc.freeze()  # a collection in a child would write to every page, and so copy it
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
    """Compile one grammar. Beyond the limits, a signal or a failed allocation ends this process."""
    try:
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        cpu_s, memory_bytes, nice, source = orjson.loads(_read_all(connection))
        size, resident = _read_memory()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes,) * 2)
        os.nice(nice)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide reports of failed allocations
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        connection.sendall(STARTED)
        matcher = build_matcher(tokenizer, source)
        error = matcher.get_error() if matcher.is_error() else None
        connection.sendall(orjson.dumps((error, _read_memory()[1] - resident)))
        os._exit(0)
    finally:
        os._exit(1)


def _read_memory() -> tuple[int, int]:
    """Return two sizes of this process: address space, and resident memory without mapped files."""
    total, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    page = resource.getpagesize()
    return int(total) * page, (int(resident) - int(shared)) * page


def _read_all(connection: socket.socket, deadline_s: float | None = None) -> bytes:
    """Read until the other end closes. Raises TimeoutError after the deadline."""
    chunks: list[bytes] = []
    while True:
        if deadline_s is not None:
            _set_timeout(connection, deadline_s)
        chunk = connection.recv(CHUNK_BYTES)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _set_timeout(connection: socket.socket, deadline_s: float) -> None:
    """Limit the next socket call to the time until the deadline.

    Raises TimeoutError after the deadline.
    """
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    connection.settimeout(remaining_s)


if __name__ == "__main__":
    serve_trials(socket.socket(fileno=0))
