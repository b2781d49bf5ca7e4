"""Passes that run alone: a second session per model, which uses all cores.

Under load one thread per pass computes most. A request that is alone on the machine would leave
the other cores idle, so the batch scheduler gives it these engines where the cost tables show a
gain. Their memory is bounded by the bytes of the graphs; a graph is opened at its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from deployments.engines.base import EncoderEngine
from deployments.errors import ServeError
from deployments.messages import ModelRef
from deployments.tuning.costs import CostTable, Shape, TuningTarget, Variant, read_costs
from deployments.tuning.opening import open_tuned_engine
from deployments.tuning.selection import nearest_shape

log = logging.getLogger("ray.serve.hundredfold")

# Differences below this are noise of the measurement, or the cost of waking threads.
MIN_GAIN = 0.1
_CACHED_SHAPES = 4_096


class LonePassEngines:
    """Engines with all cores by model, opened in the background. Use from one event loop.

    `targets` are those of the replica's engines with one thread; `max_bytes` bounds the sum of the
    graph files that are opened a second time.
    """

    def __init__(
        self, targets: Mapping[ModelRef, TuningTarget], *, threads: int, max_bytes: int
    ) -> None:
        self._targets = {
            ref: _with_threads(target, threads)
            for ref, target in targets.items()
            if target.settings.intra_op_threads < threads
        }
        self._gains = {
            ref: gain
            for ref, target in self._targets.items()
            if (gain := _read_gain(targets[ref], target)) is not None
        }
        self._free_bytes = max_bytes
        self._engines: dict[ModelRef, EncoderEngine] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="lone-passes")

    def find(self, model: ModelRef, items: int, tokens: int) -> EncoderEngine | None:
        """Return the engine for a lone pass of this shape, or None if one thread is as fast.

        None too while the engine is being opened.
        """
        gain = self._gains.get(model)
        if gain is None or not gain.applies(items, tokens):
            return None
        engine = self._engines.get(model)
        if engine is None and model in self._targets:
            self._opener.submit(self._open, model, self._targets.pop(model))
        return engine

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


class _Gain:
    """The measured shapes at which all cores are faster than one thread."""

    def __init__(self, one_thread: Mapping[Shape, float], all_cores: Mapping[Shape, float]) -> None:
        self._is_faster = {
            shape: all_cores[shape] < one_thread[shape] * (1 - MIN_GAIN)
            for shape in all_cores.keys() & one_thread.keys()
        }
        self.is_any = any(self._is_faster.values())
        self.applies = lru_cache(_CACHED_SHAPES)(self._applies)

    def _applies(self, items: int, tokens: int) -> bool:
        return self._is_faster[nearest_shape(self._is_faster, items, tokens)]


def _with_threads(target: TuningTarget, threads: int) -> TuningTarget:
    settings = target.settings.model_copy(update={"intra_op_threads": threads})
    return replace(target, settings=settings)


def _read_gain(one_thread: TuningTarget, all_cores: TuningTarget) -> _Gain | None:
    """Compare the cost tables; None if one is missing or nothing is gained."""
    tables = read_costs(one_thread), read_costs(all_cores)
    if tables[0] is None or tables[1] is None:
        return None
    if len({_precisions(table) for table in tables if table is not None}) > 1:
        return None  # the response must not depend on the load
    gain = _Gain(_selected_times(tables[0]), _selected_times(tables[1]))
    return gain if gain.is_any else None


def _precisions(table: CostTable) -> frozenset[str]:
    selected = set(table.selected_variants())
    return frozenset(row.precision for row in table.rows if row.variant in selected)


def _selected_times(table: CostTable) -> dict[Shape, float]:
    times: dict[Variant, dict[Shape, float]] = {row.variant: row.by_shape() for row in table.rows}
    return {
        shape: times[variant][shape]
        for shape, variant in table.selection
        if shape in times.get(variant, {})
    }


def _graph_bytes(target: TuningTarget) -> int:
    table = read_costs(target)
    names = {variant.candidate for variant in table.selected_variants()} if table else set()
    return sum(
        (target.artifact / candidate.graph).stat().st_size
        for candidate in target.candidates
        if candidate.name in names
    )
