"""Timing of several engines over several shapes, in interleaved rounds within one time budget.

In each round, all engines run the same batch one after the other. A temporary slowdown of the host
therefore affects all of them. An engine that is far behind skips the remaining rounds of a shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from statistics import median

import numpy as np

from deployments.artifacts.types import Device
from deployments.batching.batch_policy import collate
from deployments.engines.base import EncoderEngine
from deployments.engines.forward_pass import Batch
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from deployments.tuning.costs import Cost, Shape

log = logging.getLogger("ray.serve.hundredfold")

DEFAULT_ITEMS = (1, 4, 8, 32)
DEFAULT_TOKENS = (16, 64, 128, 256, 512)
# A timing repeats a short forward pass as often as fits in this time, because reading the clock
# takes microseconds.
_MIN_TIMING_S = 0.004
# An untimed pass precedes the timing of passes shorter than this, because the CPU caches hold the
# weights of the previous engine. Loading the weights of the next engine takes a few milliseconds,
# which a host that serves one model never spends.
_CACHE_WARM_UP_BELOW_S = 0.05
_LENGTHS = 4  # batch lengths per shape (see build_batches)
_WARM_PASSES = _LENGTHS + 1
_MIN_ROUNDS = 5
_MAX_ROUNDS = 25
# After _MIN_ROUNDS, an engine whose median exceeds the lowest median times this factor skips the
# remaining rounds.
_MAX_SLOWDOWN = 1.3

_IDLE_CHECK_S = 0.005
_MAX_IDLE_CHECKS = 40
_MAX_IDLE_CPU_SHARE = 0.1

ClockFunction = Callable[[], float]  # seconds


def choose_clock(device: Device, threads: int) -> ClockFunction:
    """Select the clock for forward passes of `threads` threads on `device`.

    One CPU thread is timed by the CPU time of the process, which stops while other processes have
    the core. A low-priority process next to a busy replica therefore measures the same times as on
    an idle host. Time in which this process waits for the core does not count against the budget.
    """
    return time.process_time if device is Device.CPU and threads == 1 else time.perf_counter


def wait_until_idle(
    cpu_time_s: ClockFunction = time.process_time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the threads of this process are idle, at most 0.2 s.

    Engine threads may spin after a pass: 0.8 ms for ONNX Runtime, where `open_session` limits the
    spinning, and 8 ms for torch. `cpu_time_s` returns the CPU time of the process.
    """
    for _ in range(_MAX_IDLE_CHECKS):
        before_s = cpu_time_s()
        sleep(_IDLE_CHECK_S)
        if cpu_time_s() - before_s < _IDLE_CHECK_S * _MAX_IDLE_CPU_SHARE:
            return


def supported_shapes(
    max_tokens: int,
    items: Sequence[int] = DEFAULT_ITEMS,
    tokens: Sequence[int] = DEFAULT_TOKENS,
) -> tuple[Shape, ...]:
    """Return all shapes within `max_tokens`, smallest first; at least one."""
    lengths = [n for n in tokens if n <= max_tokens] or [max_tokens]
    shapes = [Shape(items=count, tokens=length) for count in items for length in lengths]
    return tuple(sorted(shapes, key=lambda shape: (shape.area, shape.items)))


def measure(
    engines: Mapping[str, EncoderEngine],
    shapes: Sequence[Shape],
    build_shape_batches: Callable[[Shape], Sequence[Batch]],
    budget_s: float,
    clock: ClockFunction = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, tuple[Cost, ...]]:
    """Return the costs of each engine by name at the shapes that fit in the budget.

    Shapes are measured in the given order, each with an equal share of the remaining budget; pass
    small shapes first. The first shape is always measured. All engines are measured at the same
    shapes. The result lacks an engine that fails at any shape; it is empty if all fail.
    `build_shape_batches` returns the batches of a shape, which rotate between rounds. `wait` is
    called before each timing. All times are times of `clock`.
    """
    running = dict(engines)
    costs_by_shape: dict[Shape, dict[str, Cost]] = {}
    started_s = clock()
    s_per_token = 0.0
    for index, shape in enumerate(shapes):
        remaining_s = budget_s - (clock() - started_s)
        # Skip the shape if warm-up and _MIN_ROUNDS rounds of all engines would exceed the budget.
        # The estimate scales the times of the previous shape.
        if index and s_per_token * shape.area * (_WARM_PASSES + _MIN_ROUNDS) > remaining_s:
            continue
        measurement = _ShapeMeasurement(running, build_shape_batches(shape), clock, wait)
        measurement.run(remaining_s / (len(shapes) - index))
        if not running:
            return {}
        costs_by_shape[shape] = measurement.costs(shape)
        s_per_token = measurement.round_s() / shape.area
    return {name: tuple(costs[name] for costs in costs_by_shape.values()) for name in running}


class _EngineFailure(Exception):
    """A failure with the name of the engine that failed, so that only this engine is dropped."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass(slots=True)
class _ShapeMeasurement:
    """Timing of all engines on the batches of one shape. Removes failed engines from `engines`."""

    engines: dict[str, EncoderEngine]
    batches: Sequence[Batch]
    clock: ClockFunction
    wait: Callable[[], None]
    times_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, budget_s: float) -> None:
        while self.engines:
            try:
                self._run_rounds(budget_s)
            except _EngineFailure as failed:
                log.warning("%s is not measured further: %s", failed.name, failed)
                del self.engines[failed.name]
            else:
                return

    def _run_rounds(self, budget_s: float) -> None:
        deadline_s = self.clock() + budget_s
        pass_s = {name: self._warm_up(name) for name in self.engines}
        self.times_s = {name: [] for name in self.engines}
        running = list(self.engines)
        for round_number in range(_MAX_ROUNDS):
            if round_number >= _MIN_ROUNDS:
                if self.clock() > deadline_s:
                    return
                running = self._keep_near_fastest(running)
            # A rotating start averages out the effect of the preceding engine.
            start = round_number % len(running)
            batch = self.batches[round_number % len(self.batches)]
            for name in running[start:] + running[:start]:
                self.times_s[name].append(self._time_engine(name, batch, pass_s[name]))

    def _time_engine(self, name: str, batch: Batch, pass_s: float) -> float:
        """Return seconds per forward pass. Run short passes several times, after an untimed one."""
        self.wait()
        if pass_s < _CACHE_WARM_UP_BELOW_S:
            self._time_passes(name, batch, 1)
        return self._time_passes(name, batch, max(1, int(_MIN_TIMING_S / max(pass_s, 1e-6))))

    def round_s(self) -> float:
        """Return the sum of the median pass times of all engines."""
        return sum(median(times) for times in self.times_s.values())

    def costs(self, shape: Shape) -> dict[str, Cost]:
        """Return the cost of each engine, corrected for rounds in which the host was slower.

        Each time of an engine is divided by the time of the fastest engine in the same round. The
        engine's `median_ms` is the median of these ratios, times the median of the fastest times.
        `low_ms` is not corrected.
        """
        rounds = max(map(len, self.times_s.values()))
        fastest_s = [
            min(times[i] for times in self.times_s.values() if i < len(times))
            for i in range(rounds)
        ]
        typical_s = median(fastest_s)
        return {
            name: Cost(
                shape=shape,
                median_ms=typical_s * 1e3 * median(map(truediv, times, fastest_s)),
                low_ms=min(times) * 1e3,
                rounds=len(times),
            )
            for name, times in self.times_s.items()
        }

    def _warm_up(self, name: str) -> float:
        """Run one pass per batch, which allocates memory. Return the seconds of one more pass."""
        for batch in self.batches:
            self._time_passes(name, batch, 1)
        return self._time_passes(name, self.batches[0], 1)

    def _time_passes(self, name: str, batch: Batch, repeats: int) -> float:
        started_s = self.clock()
        try:
            for _ in range(repeats):
                self.engines[name].run(batch)
        except EngineFailed as exc:
            raise _EngineFailure(name, exc.message) from exc
        return (self.clock() - started_s) / repeats

    def _keep_near_fastest(self, running: Sequence[str]) -> list[str]:
        medians = {name: median(self.times_s[name]) for name in running}
        limit = min(medians.values()) * _MAX_SLOWDOWN
        return [name for name in running if medians[name] <= limit]


def build_batches(items: Sequence[TokenizedItem], shape: Shape, seed: int = 0) -> tuple[Batch, ...]:
    """Build full batches of up to `shape` from the tokens of `items`.

    The tokens are real, because int8 ranges depend on them. The batches have up to four lengths, as
    real batches do. The times of an engine that pads to buckets then include its padding. The
    batches themselves have no padding, because batches of the scheduler have very little.
    """
    lengths = dict.fromkeys(max(1, shape.tokens - n * shape.tokens // 16) for n in range(_LENGTHS))
    shapes = (Shape(items=shape.items, tokens=length) for length in lengths)
    return tuple(build_batch(items, actual, seed) for actual in shapes)


def build_batch(items: Sequence[TokenizedItem], shape: Shape, seed: int = 0) -> Batch:
    """Build a batch of exactly `shape` from the tokens of `items`, sampled with `seed`."""
    rng = np.random.default_rng(seed)
    flat = np.concatenate([item.ids for item in items])
    rows = rng.choice(flat, size=(shape.items, shape.tokens)).astype(np.int32)
    # Every row starts with the first token of an item, such as [CLS], because some models pool it.
    rows[:, 0] = int(items[0].ids[0])
    return collate([TokenizedItem(row, shape.tokens) for row in rows])
