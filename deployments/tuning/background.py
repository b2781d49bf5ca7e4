"""Tuning beside serving: models that nobody tuned for this host, one after the other.

The measuring is done by a process of its own at the lowest priority, so that neither its memory
nor its failures are the replica's. It opens every candidate at once, as far as half of the free
memory holds them (`memory.py`), and the replica holds the old and the new engine for the moment of
the exchange. On a GPU there is no priority: passes of the two processes take turns.
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

Adopt = Callable[[ModelRef, EncoderEngine], None]
Start = Callable[[TuningTarget], subprocess.Popen[bytes]]


class BackgroundTuner:
    """Tunes the models of one replica, each once per kind of host, whoever does it.

    `adopt` is called from a thread with the engine that a model is to be served with from now on.
    Whatever goes wrong is told in the log once, and what served before goes on serving.
    """

    def __init__(
        self,
        untuned: Mapping[ModelRef, TuningTarget],
        adopt: Adopt,
        start_child: Start = process.start,
        poll_s: float = 2.0,
    ) -> None:
        self._untuned = untuned
        self._adopt = adopt
        self._start_child = start_child
        self._poll_s = poll_s  # how often to look whether another replica has finished
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._child_changes = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tuning", daemon=True)

    def start(self) -> None:
        """Begin, unless there is nothing to tune."""
        if self._untuned:
            self._thread.start()

    def close(self) -> None:
        """End the process that measures, and wait until no engine is exchanged any more."""
        self._stopping.set()
        with self._child_changes:
            if self._child is not None:
                self._child.kill()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        for ref, target in self._untuned.items():
            try:
                goes_on = self._tune(ref, target)
            except (ServeError, OSError) as error:  # OSError: no process can be started
                log.warning("%s is not tuned for this host: %s", ref.id, error)
            except Exception:
                log.exception("%s is not tuned for this host, this is a bug", ref.id)
            else:
                if not goes_on:
                    return

    def _tune(self, ref: ModelRef, target: TuningTarget) -> bool:
        """Whether it makes sense to go on with the other models."""
        started_s = time.monotonic()
        while not self._stopping.is_set():
            # In this order: what was kept before the lock was found free is seen.
            if is_tuning(target):
                self._stopping.wait(self._poll_s)
                continue
            if (table := read_costs(target)) is not None:
                self._exchange(ref, target, table)
                passed_s, names = time.monotonic() - started_s, _names(table)
                log.info("%s is tuned for this host after %.0f s: %s", ref.id, passed_s, names)
                return True
            log.info("%s is being tuned for this host in the background", ref.id)
            ending, said = self._measure(target)
            if ending == ExitCode.BUSY:  # somebody was quicker
                self._stopping.wait(self._poll_s)
            elif ending == ExitCode.STORE_NOT_WRITABLE:
                log.warning("models are not tuned for this host: %s", _reason(said))
                return False
            elif not self._stopping.is_set() and read_costs(target) is None:
                log.warning("%s is not tuned for this host: %s (%d)", ref.id, _reason(said), ending)
                return True
        return False

    def _measure(self, target: TuningTarget) -> tuple[int, str]:
        """The exit status of the process that measures, and all it said."""
        with self._child_changes:
            if self._stopping.is_set():
                return ExitCode.FAILED, ""
            self._child = self._start_child(target)
        with self._child as child:
            assert child.stderr is not None, "it was asked for; this is a bug"
            said = child.stderr.read()  # until the process has ended
        return child.returncode, said.decode(errors="replace")

    def _exchange(self, ref: ModelRef, target: TuningTarget, table: CostTable) -> None:
        default = default_candidate(target)
        if table.selected_variants() == (Variant.of(default.name, default.options),):
            return  # it serves already
        engine, is_tuned = open_tuned_engine(target)
        if is_tuned:
            self._adopt(ref, engine)
        else:
            engine.close()


def _names(table: CostTable) -> str:
    return ", ".join(variant.name for variant in table.selected_variants())


def _reason(said: str) -> str:
    """The line of a process that says why it ended: its error, else its last words."""
    lines = [line for line in said.splitlines() if line] or ["it said nothing"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1]
