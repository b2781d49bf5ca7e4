"""Plans of lone passes: forward passes of a replica in which no other pass runs or waits.

Under load, one thread per pass gives the highest throughput. A lone pass would leave the other
cores idle. A model therefore gets a second session, which uses all cores. Lone passes use the
faster of the two, which they learn from their own times (`lone_times.py`). A limit applies to the
total size of the graph files of all second sessions. A second session is opened in the background
when a pass could first use it. A brief lone pass runs on the event loop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from deployments.artifacts.types import Device
from deployments.batching.replica_hooks import USUAL_PASS, LonePass
from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.host.thread_priority import lower_thread_priority
from deployments.messages import ModelRef
from deployments.tuning.costs import CostTable, TuningTarget, read_costs, selected_costs
from deployments.tuning.lone_times import LonePassTimes, SessionTime
from deployments.tuning.opening import default_candidate, open_selected
from deployments.tuning.selection import select_again
from deployments.tuning.similar_costs import find_selecting_costs

log = logging.getLogger("ray.serve.hundredfold")

# Passes that are predicted to take up to this many milliseconds run on the event loop, which
# answers nothing meanwhile. In a thread, a pass would take 0.3 ms more, to send its batch there and
# its result back.
BRIEF_MS = 5.0
# Passes use the usual session for this many seconds after two calls overlapped. With few clients a
# pass often finds the replica idle, but the next call arrives during the pass and would wait for
# cores.
OVERLAP_S = 1.0


class RecentOverlaps:
    """Context manager that each call enters; true if calls overlapped in the last OVERLAP_S."""

    def __init__(self) -> None:
        self._calls = 0
        self._latest_s = -math.inf

    def __enter__(self) -> None:
        self._calls += 1
        self._note()

    def __exit__(self, *_: object) -> None:
        self._note()
        self._calls -= 1

    def __bool__(self) -> bool:
        return time.monotonic() < self._latest_s + OVERLAP_S

    def _note(self) -> None:
        if self._calls > 1:
            self._latest_s = time.monotonic()


class LonePassPlanner:
    """Planner of lone passes. It opens second sessions in the background.

    A second session uses `threads` threads. `max_bytes` bounds the total size of the graph files
    that are opened a second time. Any thread may add and remove models.
    """

    def __init__(self, *, threads: int, max_bytes: int) -> None:
        self.overlaps = RecentOverlaps()
        self._threads = threads
        self._times: dict[ModelRef, LonePassTimes] = {}
        self._unopened: dict[ModelRef, _Unopened] = {}
        self._max_bytes = self._free_bytes = max_bytes
        self._engines: dict[ModelRef, _LoneEngine] = {}
        self._opener = ThreadPoolExecutor(1, "lone-passes", lower_thread_priority)
        self._lock = threading.Lock()  # for fields that the event loop and other threads change

    def find_unmeasured(self, target: TuningTarget) -> tuple[TuningTarget, ...]:
        """Return the targets to measure before a model can have a second session.

        `target` is the target of the usual engine. The result is empty on a GPU. It is also empty
        if the second session is measured already, exceeds `max_bytes` or would equal the usual one.
        Raises as `measure_graphs` does.
        """
        all_cores = _with_threads(target, self._threads)
        if target.device is not Device.CPU or all_cores == target:
            return ()
        is_needed = read_costs(all_cores) is None and measure_graphs(all_cores) <= self._max_bytes
        return (all_cores,) if is_needed else ()

    def add(self, model: ModelRef, target: TuningTarget) -> None:
        """Add a model, or read its cost tables again and forget the times of earlier passes.

        `target` is that of the usual engine. Has no effect on a GPU, or if the usual engine has no
        cost table of this host.
        """
        usual = read_costs(target) if target.device is Device.CPU else None
        if usual is None:
            return
        all_cores = _with_threads(target, self._threads)
        second = read_costs(all_cores)
        # If the second session rounded differently, the answer would depend on the load.
        second = None if second is None else select_again(second, _roundings(usual))
        all_cores_costs = {} if second is None else selected_costs(second)
        times = LonePassTimes(selected_costs(usual), all_cores_costs)
        unopened = None
        if second is not None:
            unopened = _Unopened(all_cores, second, _count_bytes(all_cores, second))
        with self._lock:
            self._times[model] = times
            if unopened is not None and model not in self._engines:
                self._unopened[model] = unopened

    def remove(self, model: ModelRef) -> None:
        """Remove a model that no pass uses, and close its second session."""
        with self._lock:
            self._times.pop(model, None)
            self._unopened.pop(model, None)
            lone = self._engines.pop(model, None)
            self._free_bytes += 0 if lone is None else lone.size
        if lone is not None:
            lone.engine.close()

    def plan(self, model: ModelRef, items: int, tokens: int) -> LonePass:
        """Plan a lone pass of this shape, `tokens` per item.

        If calls overlapped recently, the pass uses the usual session. Until the second session is
        open, the pass also uses the usual session. The second session is opened in the background
        if it fits in `max_bytes`.
        """
        model_times = self._times.get(model)
        if model_times is None:
            return USUAL_PASS
        times = model_times.at(items, tokens)
        session, engine = times.usual, None
        if not self.overlaps:
            lone = self._engines.get(model)
            if lone is not None:
                session = times.choose()
                engine = None if session is times.usual else lone.engine
            elif times.all_cores is not None and model in self._unopened:
                self._open_if_it_fits(model)
        padded_tokens = items * tokens
        is_brief = session.predict_s(padded_tokens) * 1e3 <= BRIEF_MS
        return LonePass(engine, is_brief, partial(self._record, session, padded_tokens))

    def close(self) -> None:
        self._opener.shutdown(cancel_futures=True)
        for lone in self._engines.values():
            lone.engine.close()

    def _record(self, session: SessionTime, padded_tokens: int, forward_s: float) -> None:
        if not self.overlaps:  # otherwise the pass may have shared the cores with another one
            session.record(padded_tokens, forward_s)

    def _open_if_it_fits(self, model: ModelRef) -> None:
        """Open the second session in the background if it fits; otherwise a later pass retries."""
        with self._lock:
            unopened = self._unopened.get(model)
            if unopened is None or unopened.size > self._free_bytes:
                return
            del self._unopened[model]
            self._free_bytes -= unopened.size
        self._opener.submit(self._open, model, unopened)

    def _open(self, model: ModelRef, unopened: _Unopened) -> None:
        engine = None
        try:
            engine = open_selected(unopened.target, unopened.table)
        except Exception as error:
            log.warning(
                "%s: the session for lone passes cannot be opened: %s",
                model.id,
                error,
                exc_info=None if isinstance(error, ServeError) else error,
            )
        with self._lock:
            # Meanwhile the model may have been removed, and even added again with another session.
            is_used = engine is not None and model in self._times and model not in self._engines
            if engine is not None and is_used:
                self._engines[model] = _LoneEngine(engine, unopened.size)
                self._unopened.pop(model, None)
            else:
                self._free_bytes += unopened.size
        if is_used:
            threads, size = unopened.target.settings.intra_op_threads, unopened.size
            log.info("%s: lone passes use %d threads; graphs of %d bytes", model.id, threads, size)
        elif engine is not None:
            engine.close()


class _Unopened(NamedTuple):
    target: TuningTarget
    table: CostTable
    size: int  # bytes of its graphs


class _LoneEngine(NamedTuple):
    engine: EncoderEngine
    size: int  # bytes of its graphs


def _with_threads(target: TuningTarget, threads: int) -> TuningTarget:
    settings = target.settings.model_copy(update={"intra_op_threads": threads})
    return replace(target, settings=settings)


def _roundings(table: CostTable) -> frozenset[str]:
    selected = set(table.selected_variants())
    return frozenset(row.rounding for row in table.rows if row.variant in selected)


def measure_graphs(target: TuningTarget) -> int:
    """Return the file bytes of the graphs that `open_tuned_engine` tries first.

    Raises as `default_candidate` does if no cost table selects the graphs.
    """
    table = find_selecting_costs(target)
    if table is None:
        return target.manifest.count_bytes(default_candidate(target))
    return _count_bytes(target, table)


def _count_bytes(target: TuningTarget, table: CostTable) -> int:
    names = {variant.candidate for variant in table.selected_variants()}
    chosen = (candidate for candidate in target.candidates if candidate.name in names)
    return sum(target.manifest.count_bytes(candidate) for candidate in chosen)
