"""Passes that run alone: on all cores where this is faster, and in place where they are brief.

Under load one thread per pass computes most. A request that is alone on the machine would leave
the other cores idle, so a model gets a second session, which uses all cores, where the cost tables
show a gain. The memory of these sessions is bounded by the bytes of the graphs; a graph is opened
at its first use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from deployments.batching.scheduler import LonePass
from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.messages import ModelRef
from deployments.thread_priority import lower_priority
from deployments.tuning.costs import CostTable, Shape, TuningTarget, read_costs, selected_times
from deployments.tuning.opening import open_tuned_engine
from deployments.tuning.selection import nearest_shape
from deployments.tuning.similar_costs import find_selecting_costs

log = logging.getLogger("ray.serve.hundredfold")

# Differences below this are noise of the measurement, or the cost of waking threads.
MIN_GAIN = 0.1
# ms of a pass that may block the event loop, which answers nothing meanwhile. Handing a pass to a
# thread and its result back takes 0.3 ms.
BRIEF_MS = 5.0
_CACHED_SHAPES = 4_096


_USUAL = LonePass()


class LonePassPlanner:
    """Plans the passes that run alone; opens engines in the background.

    `max_bytes` bounds the sum of the graph files that are opened a second time. Models come and go
    from any thread.
    """

    def __init__(self, *, threads: int, max_bytes: int) -> None:
        self._threads = threads
        self._times: dict[ModelRef, _LoneTimes] = {}
        self._unopened: dict[ModelRef, TuningTarget] = {}
        self._free_bytes = max_bytes
        self._engines: dict[ModelRef, _LoneEngine] = {}
        self._opener = ThreadPoolExecutor(1, "lone-passes", lower_priority)
        self._lock = threading.Lock()  # of what the opener and `remove` change

    def add(self, model: ModelRef, target: TuningTarget) -> None:
        """Add a model. `target` is that of its usual engine, with one thread."""
        all_cores = _with_threads(target, self._threads)
        if (times := _read_times(target, all_cores)) is not None:
            self._times[model] = times
            if all_cores != target:
                self._unopened[model] = all_cores

    def remove(self, model: ModelRef) -> None:
        """Remove a model that no pass uses, and close its second session."""
        self._times.pop(model, None)
        with self._lock:
            self._unopened.pop(model, None)
            lone = self._engines.pop(model, None)
            self._free_bytes += 0 if lone is None else lone.size
        if lone is not None:
            lone.engine.close()

    def plan(self, model: ModelRef, items: int, tokens: int) -> LonePass:
        """Plan a lone pass of this shape. While the second session is opened, it is not used."""
        times = self._times.get(model)
        if times is None:
            return _USUAL
        gains, is_brief = times.at(items, tokens)
        lone = self._engines.get(model) if gains else None
        if gains and (target := self._unopened.pop(model, None)) is not None:
            self._opener.submit(self._open, model, target)
        return LonePass(None if lone is None else lone.engine, is_brief)

    def close(self) -> None:
        self._opener.shutdown(cancel_futures=True)
        for lone in self._engines.values():
            lone.engine.close()

    def _open(self, model: ModelRef, target: TuningTarget) -> None:
        size = measure_graphs(target)
        if size > self._free_bytes:
            log.info(
                "%s: no session for lone passes, %d bytes are free", model.id, self._free_bytes
            )
            return
        try:
            engine, _ = open_tuned_engine(target)
        except ServeError as error:
            log.warning("%s: the session for lone passes cannot be opened: %s", model.id, error)
            return
        with self._lock:
            is_gone = model not in self._times
            if not is_gone:
                self._free_bytes -= size
                self._engines[model] = _LoneEngine(engine, size)
        if is_gone:
            engine.close()
            return
        threads = target.settings.intra_op_threads
        log.info("%s: lone passes use %d threads; graphs of %d bytes", model.id, threads, size)


class _LoneEngine(NamedTuple):
    engine: EncoderEngine
    size: int  # bytes of its graphs


class _LoneTimes:
    """What the cost tables say about lone passes, by shape."""

    def __init__(self, one_thread: Mapping[Shape, float], all_cores: Mapping[Shape, float]) -> None:
        best = {shape: min(ms, all_cores.get(shape, ms)) for shape, ms in one_thread.items()}
        self._traits = {
            shape: (best[shape] < ms * (1 - MIN_GAIN), best[shape] <= BRIEF_MS)
            for shape, ms in one_thread.items()
        }
        self.at = lru_cache(_CACHED_SHAPES)(self._at)

    def _at(self, items: int, tokens: int) -> tuple[bool, bool]:
        """Return whether all cores are faster, and whether the pass is brief."""
        return self._traits[nearest_shape(self._traits, items, tokens)]


def _with_threads(target: TuningTarget, threads: int) -> TuningTarget:
    settings = target.settings.model_copy(update={"intra_op_threads": threads})
    return replace(target, settings=settings)


def _read_times(one_thread: TuningTarget, all_cores: TuningTarget) -> _LoneTimes | None:
    """Read the cost tables; None without one for the usual engine."""
    usual, second = read_costs(one_thread), read_costs(all_cores)
    if usual is None:
        return None
    # With another precision the answer would depend on the load.
    is_same = second is not None and _precisions(second) == _precisions(usual)
    all_cores_ms = selected_times(second) if second is not None and is_same else {}
    return _LoneTimes(selected_times(usual), all_cores_ms)


def _precisions(table: CostTable) -> frozenset[str]:
    selected = set(table.selected_variants())
    return frozenset(row.precision for row in table.rows if row.variant in selected)


def measure_graphs(target: TuningTarget) -> int:
    """Return the bytes of the graphs that `open_tuned_engine` opens."""
    table = find_selecting_costs(target)
    names = {variant.candidate for variant in table.selected_variants()} if table else set()
    chosen = [each for each in target.candidates if each.name in names] or target.candidates[:1]
    return sum(target.manifest.count_bytes(candidate) for candidate in chosen)
