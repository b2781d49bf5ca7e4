"""Background tuning: a replica measures its untuned models one after the other while it serves.

A separate process of the lowest priority measures, so that its memory and failures do not affect
the replica. The process opens all candidates that fit in half of the free memory (`host.py`). While
the replica replaces its engine, it holds the old and the new engine in memory, and counts the bytes
of both. A GPU has no priorities: forward passes of the replica and of the measuring process
alternate.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.messages import ModelRef
from deployments.tuning import process
from deployments.tuning.costs import CostTable, TuningTarget, Variant, read_costs
from deployments.tuning.opening import open_selected
from deployments.tuning.process import ExitCode
from deployments.tuning.tuner import is_tuning

log = logging.getLogger("ray.serve.hundredfold")

# Called from a thread when a model has a new cost table. The arguments are the model, the target of
# the engine that serves the model now, and a function that opens the new engine. None instead of
# the function: the present engine stays.
UseTuning = Callable[[ModelRef, TuningTarget, Callable[[], EncoderEngine] | None], None]
IsLoaded = Callable[[ModelRef], bool]
StartProcess = Callable[[TuningTarget], subprocess.Popen[bytes]]


@dataclass(frozen=True, slots=True)
class Untuned:
    """A loaded model that lacks cost tables for this kind of host."""

    usual: TuningTarget  # target of the engine that serves the model now
    serving: Variant | None  # the engine's only variant; None: the engine runs several variants
    unmeasured: tuple[TuningTarget, ...]  # targets without a cost table, in the order of measuring


class BackgroundTuner:
    """Background thread that tunes the submitted models of one replica, each model once.

    If tuning fails, the failure is logged once and the current engine stays in use. If the store is
    not writable, tuning ends for all models. A model that is no longer loaded when its turn comes
    is skipped. It may be submitted again, and so may a model that is evicted during its tuning.
    """

    def __init__(
        self,
        use_tuning: UseTuning,
        is_loaded: IsLoaded,
        start_child: StartProcess = process.start,
        poll_s: float = 2.0,
    ) -> None:
        self._use_tuning = use_tuning
        self._is_loaded = is_loaded
        self._start_child = start_child
        self._poll_s = poll_s  # interval of checks whether the tuning of another replica has ended
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._child_lock = threading.Lock()
        self._submitted: set[ModelRef] = set()
        self._queue: deque[tuple[ModelRef, Untuned]] = deque()
        self._thread: threading.Thread | None = None  # runs while the queue has models
        self._queue_lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        return self._thread is None

    def has_submitted(self, model: ModelRef) -> bool:
        return model in self._submitted

    def submit(self, model: ModelRef, untuned: Untuned) -> None:
        """Append a model to the queue, unless it was submitted already."""
        with self._queue_lock:
            if model in self._submitted or self._stopping.is_set():
                return
            self._submitted.add(model)
            self._queue.append((model, untuned))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tuning", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Kill the measuring process and wait until no engine swap is in progress."""
        self._stopping.set()
        with self._child_lock:
            if self._child is not None:
                self._child.kill()
        with self._queue_lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            ref, untuned = job
            try:
                if self._is_loaded(ref):
                    self._tune(ref, untuned)
            except (ServeError, OSError) as error:  # OSError: no process can be started
                log.warning("%s is not tuned for this host: %s", ref.id, error)
            except Exception:
                log.exception("%s is not tuned for this host because of a bug", ref.id)
            if not self._is_loaded(ref):  # evicted; may be submitted after its next load
                self._submitted.discard(ref)

    def _take(self) -> tuple[ModelRef, Untuned] | None:
        with self._queue_lock:
            if self._queue and not self._stopping.is_set():
                return self._queue.popleft()
            self._thread = None
            return None

    def _tune(self, ref: ModelRef, untuned: Untuned) -> None:
        for target in untuned.unmeasured:
            table = self._await_table(ref, target)
            if table is None:
                return
            open_new = None
            if target == untuned.usual and table.selected_variants() != (untuned.serving,):
                open_new = partial(open_selected, target, table)
            self._use_tuning(ref, untuned.usual, open_new)

    def _await_table(self, ref: ModelRef, target: TuningTarget) -> CostTable | None:
        """Return the table that this or another replica measures.

        Return None if the measurement fails, or if the tuner stops before there is a table.
        """
        started_s, threads = time.monotonic(), target.settings.intra_op_threads
        while not self._stopping.is_set():
            # Check the lock before the table. A tuning process writes the table before it releases
            # the lock, so no lock and no table mean that the model still has to be measured.
            if is_tuning(target):
                self._stopping.wait(self._poll_s)
                continue
            if (table := read_costs(target)) is not None:
                log.info(
                    "%s is tuned for this host after %.0f s (threads: %d): %s",
                    ref.id,
                    time.monotonic() - started_s,
                    threads,
                    ", ".join(variant.name for variant in table.selected_variants()),
                )
                return table
            log.info(
                "%s is being tuned for this host in the background (threads: %d)", ref.id, threads
            )
            exit_code, output = self._measure(target)
            if exit_code == ExitCode.BUSY:  # another process took the lock first
                self._stopping.wait(self._poll_s)
            elif exit_code == ExitCode.STORE_NOT_WRITABLE:  # other models would fail too
                log.warning("models are not tuned for this host: %s", _reason(output))
                self._stopping.set()
            elif not self._stopping.is_set() and read_costs(target) is None:
                reason = _reason(output)
                log.warning("%s is not tuned for this host: %s (%d)", ref.id, reason, exit_code)
                return None
        return None

    def _measure(self, target: TuningTarget) -> tuple[int, str]:
        """Run the measuring process. Return its exit status and standard error."""
        with self._child_lock:
            if self._stopping.is_set():
                return ExitCode.FAILED, ""
            self._child = self._start_child(target)
        with self._child as child:
            if child.stderr is None:
                raise AssertionError("bug: the tuning process has no stderr pipe")
            output = child.stderr.read()  # blocks until the process ends
        return child.returncode, output.decode(errors="replace")


def _reason(output: str) -> str:
    """Return the last error line of a process, else its last line."""
    lines = [line for line in output.splitlines() if line] or ["it wrote no message"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1]
