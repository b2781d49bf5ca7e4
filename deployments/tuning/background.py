"""Background tuning: a replica measures its untuned models one after the other while it serves.

A separate process of the lowest priority measures, so that its memory and failures do not affect
the replica. It opens all candidates that fit in half of the free memory (`host.py`). The replica
holds the old and the new engine during the swap. A GPU has no priorities: forward passes of both
processes alternate.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.messages import ModelRef
from deployments.tuning import process
from deployments.tuning.costs import CostTable, TuningTarget, Variant, read_costs
from deployments.tuning.opening import default_candidate, open_tuned_engine
from deployments.tuning.process import ExitCode
from deployments.tuning.tuner import is_tuning

log = logging.getLogger("ray.serve.hundredfold")

SwapEngine = Callable[[ModelRef, EncoderEngine], None]
StartProcess = Callable[[TuningTarget], subprocess.Popen[bytes]]


class BackgroundTuner:
    """Tunes the models of one replica that have no cost table for this kind of host.

    `swap_engine` is called from a thread with the engine that replaces the model's current one.
    A failure is logged once; the current engine then stays in use.
    """

    def __init__(
        self,
        untuned: Mapping[ModelRef, TuningTarget],
        swap_engine: SwapEngine,
        start_child: StartProcess = process.start,
        poll_s: float = 2.0,
    ) -> None:
        self._untuned = untuned
        self._on_swap = swap_engine
        self._start_child = start_child
        self._poll_s = poll_s  # interval of checks whether another replica has finished
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._child_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tuning", daemon=True)

    def start(self) -> None:
        if self._untuned:
            self._thread.start()

    def close(self) -> None:
        """Kill the measuring process and wait until no engine swap is in progress."""
        self._stopping.set()
        with self._child_lock:
            if self._child is not None:
                self._child.kill()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        for ref, target in self._untuned.items():
            try:
                can_continue = self._tune(ref, target)
            except (ServeError, OSError) as error:  # OSError: no process can be started
                log.warning("%s is not tuned for this host: %s", ref.id, error)
            except Exception:
                log.exception("%s is not tuned for this host because of a bug", ref.id)
            else:
                if not can_continue:
                    return

    def _tune(self, ref: ModelRef, target: TuningTarget) -> bool:
        """Return False if tuning of the other models would fail too."""
        started_s = time.monotonic()
        while not self._stopping.is_set():
            # The lock is checked first: a table written before its release is then visible.
            if is_tuning(target):
                self._stopping.wait(self._poll_s)
                continue
            if (table := read_costs(target)) is not None:
                self._swap_engine(ref, target, table)
                elapsed_s, names = time.monotonic() - started_s, _names(table)
                log.info("%s is tuned for this host after %.0f s: %s", ref.id, elapsed_s, names)
                return True
            log.info("%s is being tuned for this host in the background", ref.id)
            exit_code, output = self._measure(target)
            if exit_code == ExitCode.BUSY:  # another process took the lock first
                self._stopping.wait(self._poll_s)
            elif exit_code == ExitCode.STORE_NOT_WRITABLE:
                log.warning("models are not tuned for this host: %s", _reason(output))
                return False
            elif not self._stopping.is_set() and read_costs(target) is None:
                reason = _reason(output)
                log.warning("%s is not tuned for this host: %s (%d)", ref.id, reason, exit_code)
                return True
        return False

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

    def _swap_engine(self, ref: ModelRef, target: TuningTarget, table: CostTable) -> None:
        default = default_candidate(target)
        if table.selected_variants() == (Variant.of(default.name, default.options),):
            return  # this variant already serves
        engine, is_tuned = open_tuned_engine(target)
        if is_tuned:
            self._on_swap(ref, engine)
        else:
            engine.close()


def _names(table: CostTable) -> str:
    return ", ".join(variant.name for variant in table.selected_variants())


def _reason(output: str) -> str:
    """Return the last error line of a process, else its last line."""
    lines = [line for line in output.splitlines() if line] or ["it wrote no message"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1]
