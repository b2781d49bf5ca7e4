"""Engines side by side over shapes: interleaved rounds, medians, one budget of time.

All of them run the same batch one after the other, round by round, so a machine that slows down
does so for every one alike. Who has fallen far behind is spared the remaining rounds of a shape.
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
from deployments.batching.batches import collate
from deployments.engines.base import EncoderEngine
from deployments.errors import EngineFailed
from deployments.messages import Batch, TokenizedItem
from deployments.tuning.costs import Cost, Shape

log = logging.getLogger("ray.serve.hundredfold")

DEFAULT_ITEMS = (1, 4, 8, 32)
DEFAULT_TOKENS = (16, 64, 128, 256, 512)
# Passes shorter than this are repeated within a turn: a clock reading costs microseconds.
_LEAST_TURN_S = 0.004
# Another engine's turn leaves its own weights in the caches, which costs the next one a few
# milliseconds that nobody who serves one model ever sees.
_CACHES_MATTER_BELOW_S = 0.05
_LENGTHS = 4
_WARM_PASSES = _LENGTHS + 1
_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 25
# After the fewest rounds, who is slower than the fastest by this factor is not measured further.
_BEHIND = 1.3

_REST_CHECK_S = 0.005
_MOST_REST_CHECKS = 40
_BUSY_SHARE = 0.1

ClockFunction = Callable[[], float]  # seconds


def choose_clock(device: Device, threads: int) -> ClockFunction:
    """The clock that passes of `threads` threads on `device` are measured by.

    With one thread it is the time that this process computes: it stands still while others have
    the core, so that a process of the lowest priority measures the same beside a busy replica,
    and its budget lasts longer instead of running out before the larger shapes.
    """
    return time.process_time if device is Device.CPU and threads == 1 else time.perf_counter


def wait_until_idle(
    busy: ClockFunction = time.process_time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until no thread of this process spins any more, 0.2 s at most.

    Idle engine threads may spin: ONNX Runtime's for 36 ms, torch's for 8 ms, as measured. `busy`
    tells how long the process has kept processors busy.
    """
    for _ in range(_MOST_REST_CHECKS):
        before_s = busy()
        sleep(_REST_CHECK_S)
        if busy() - before_s < _REST_CHECK_S * _BUSY_SHARE:
            return


def supported_shapes(
    max_tokens: int,
    items: Sequence[int] = DEFAULT_ITEMS,
    tokens: Sequence[int] = DEFAULT_TOKENS,
) -> tuple[Shape, ...]:
    """Every combination that the model can read, smallest first; never none."""
    readable = [n for n in tokens if n <= max_tokens] or [max_tokens]
    shapes = [Shape(items=count, tokens=length) for count in items for length in readable]
    return tuple(sorted(shapes, key=lambda shape: (shape.area, shape.items)))


def measure(
    engines: Mapping[str, EncoderEngine],
    shapes: Sequence[Shape],
    batches_of: Callable[[Shape], Sequence[Batch]],
    budget_s: float,
    clock: ClockFunction = time.perf_counter,
    rest: Callable[[], None] = lambda: None,
) -> dict[str, tuple[Cost, ...]]:
    """The costs of each engine by name, at those shapes that the budget sufficed for.

    `shapes` are measured in order, each with its share of what is left, so put the cheap ones
    first. The first one is always measured, and no shape is measured with some engines only. An
    engine that fails is left out altogether. `batches_of` gives the batches of a shape, which
    take turns; `rest` is called before each turn of an engine.
    """
    running = dict(engines)
    found: dict[Shape, dict[str, Cost]] = {}
    started_s = clock()
    s_per_token = 0.0
    for index, shape in enumerate(shapes):
        left_s = budget_s - (clock() - started_s)
        # Everybody's warm passes and fewest rounds, guessed from the shape before.
        if index and s_per_token * shape.area * (_WARM_PASSES + _FEWEST_ROUNDS) > left_s:
            continue
        contest = _ShapeMeasurement(running, batches_of(shape), clock, rest)
        contest.run(left_s / (len(shapes) - index))
        if not running:
            return {}
        found[shape] = contest.costs(shape)
        s_per_token = contest.round_s() / shape.area
    return {name: tuple(costs[name] for costs in found.values()) for name in running}


class _Failed(Exception):
    """An engine gave up in the middle of a contest."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass(slots=True)
class _ShapeMeasurement:
    """All engines on the batches of one shape; those that fail leave `engines`."""

    engines: dict[str, EncoderEngine]
    batches: Sequence[Batch]
    clock: ClockFunction
    rest: Callable[[], None]
    times_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, budget_s: float) -> None:
        while self.engines:
            try:
                self._hold(budget_s)
            except _Failed as failed:
                log.warning("%s is not measured further: %s", failed.name, failed)
                del self.engines[failed.name]
            else:
                return

    def _hold(self, budget_s: float) -> None:
        end_s = self.clock() + budget_s
        pass_s = {name: self._warm_up(name) for name in self.engines}
        self.times_s = {name: [] for name in self.engines}
        running = list(self.engines)
        for round_number in range(_MOST_ROUNDS):
            if round_number >= _FEWEST_ROUNDS:
                if self.clock() > end_s:
                    return
                running = self._near(running)
            # Another one goes first each time, so that what follows whom evens out.
            turn = round_number % len(running)
            batch = self.batches[round_number % len(self.batches)]
            for name in running[turn:] + running[:turn]:
                self.times_s[name].append(self._turn(name, batch, pass_s[name]))

    def _turn(self, name: str, batch: Batch, pass_s: float) -> float:
        """Seconds per pass. Short ones are repeated, behind one that only fills the caches."""
        self.rest()
        if pass_s < _CACHES_MATTER_BELOW_S:
            self._timed(name, batch, 1)
        return self._timed(name, batch, max(1, int(_LEAST_TURN_S / max(pass_s, 1e-6))))

    def round_s(self) -> float:
        """Time of one pass of every engine."""
        return sum(median(times) for times in self.times_s.values())

    def costs(self, shape: Shape) -> dict[str, Cost]:
        """What each engine took, freed of what slowed down whole rounds.

        An engine's median is that of its ratio to the fastest of its round, times the median of
        those fastest: a machine that is slower in some rounds moves neither ratio nor order.
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
        """Seconds of a pass, once every shape had its first, which allocates and packs."""
        for batch in self.batches:
            self._timed(name, batch, 1)
        return self._timed(name, self.batches[0], 1)

    def _timed(self, name: str, batch: Batch, repeats: int) -> float:
        started_s = self.clock()
        try:
            for _ in range(repeats):
                self.engines[name].run(batch)
        except EngineFailed as exc:
            raise _Failed(name, exc.message) from exc
        return (self.clock() - started_s) / repeats

    def _near(self, running: Sequence[str]) -> list[str]:
        medians = {name: median(self.times_s[name]) for name in running}
        limit = min(medians.values()) * _BEHIND
        return [name for name in running if medians[name] <= limit]


def build_batches(items: Sequence[TokenizedItem], shape: Shape, seed: int = 0) -> tuple[Batch, ...]:
    """Full batches of up to `shape` made of the tokens of `items`.

    Real tokens, because the ranges that int8 works with depend on them. Of four lengths, because
    traffic never has just the measured one: an engine that pads to buckets pays for it here as
    it will there. No other padding: the planner keeps batches nearly free of it.
    """
    lengths = dict.fromkeys(max(1, shape.tokens - n * shape.tokens // 16) for n in range(_LENGTHS))
    shapes = (Shape(items=shape.items, tokens=length) for length in lengths)
    return tuple(build_batch(items, actual, seed) for actual in shapes)


def build_batch(items: Sequence[TokenizedItem], shape: Shape, seed: int = 0) -> Batch:
    """A batch of exactly `shape`, made of the tokens of `items` in a seeded order."""
    rng = np.random.default_rng(seed)
    flat = np.concatenate([item.ids for item in items])
    rows = rng.choice(flat, size=(shape.items, shape.tokens)).astype(np.int32)
    # The first token of an item opens every sequence: models look there.
    rows[:, 0] = int(items[0].ids[0])
    return collate([TokenizedItem(row, shape.tokens) for row in rows])
