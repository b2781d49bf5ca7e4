"""Passes that run alone: on all cores where this is faster, and in place where they are brief.

Under load one thread per pass computes most. A request that is alone on the machine would leave
the other cores idle, so a model gets a second session, which uses all cores, where the cost tables
show a gain. The memory of these sessions is bounded by the bytes of the graphs; a graph is opened
at its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from deployments.batching.scheduler import LonePass
from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.messages import ModelRef
from deployments.tuning.costs import CostTable, Shape, TuningTarget, read_costs, selected_times
from deployments.tuning.opening import open_tuned_engine
from deployments.tuning.selection import nearest_shape

log = logging.getLogger("ray.serve.hundredfold")

# Differences below this are noise of the measurement, or the cost of waking threads.
MIN_GAIN = 0.1
# ms of a pass that may block the event loop, which answers nothing meanwhile. Handing a pass to a
# thread and its result back takes 0.3 ms.
BRIEF_MS = 5.0
_CACHED_SHAPES = 4_096


_USUAL = LonePass()


class LonePassPlanner:
    """Plans the passes that run alone; opens engines in the background. Use from one event loop.

    `targets` are those of the replica's engines with one thread; `max_bytes` bounds the sum of the
    graph files that are opened a second time.
    """

    def __init__(
        self, targets: Mapping[ModelRef, TuningTarget], *, threads: int, max_bytes: int
    ) -> None:
        all_cores = {ref: _with_threads(target, threads) for ref, target in targets.items()}
        self._times = {
            ref: times
            for ref, target in targets.items()
            if (times := _read_times(target, all_cores[ref])) is not None
        }
        self._unopened = {
            ref: target for ref, target in all_cores.items() if target != targets[ref]
        }
        self._free_bytes = max_bytes
        self._engines: dict[ModelRef, EncoderEngine] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="lone-passes")

    def plan(self, model: ModelRef, items: int, tokens: int) -> LonePass:
        """Plan a lone pass of this shape. While the second session is opened, it is not used."""
        times = self._times.get(model)
        if times is None:
            return _USUAL
        gains, is_brief = times.at(items, tokens)
        engine = self._engines.get(model) if gains else None
        if gains and model in self._unopened:
            self._opener.submit(self._open, model, self._unopened.pop(model))
        return LonePass(engine, is_brief)

    def close(self) -> None:
        self._opener.shutdown(cancel_futures=True)
        for engine in self._engines.values():
            engine.close()

    def _open(self, model: ModelRef, target: TuningTarget) -> None:
        size = _graph_bytes(target)
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
        self._free_bytes -= size
        self._engines[model] = engine
        threads = target.settings.intra_op_threads
        log.info("%s: lone passes use %d threads; graphs of %d bytes", model.id, threads, size)


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


def _graph_bytes(target: TuningTarget) -> int:
    table = read_costs(target)
    names = {variant.candidate for variant in table.selected_variants()} if table else set()
    return sum(
        (target.artifact / candidate.graph).stat().st_size
        for candidate in target.candidates
        if candidate.name in names
    )
