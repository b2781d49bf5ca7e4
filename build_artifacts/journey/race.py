"""Engines side by side: sequential passes in interleaved blocks, and full batches per second.

A machine that slows down does so for every engine alike, because they take turns. Within its turn
an engine's passes follow one another, and an untimed one goes first: who follows another engine
finds a cold cache, which nobody who serves one model ever sees. Before that the process comes to
rest, because idle engine threads spin: ONNX Runtime's for 36 ms, torch's for 8 ms, as measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import median

from build_artifacts.journey.figures import Latency, Throughput
from deployments.engines import Engine
from deployments.errors import EngineFailed
from deployments.messages import Batch
from deployments.tuning.measure import come_to_rest

BLOCKS = 5
FEWEST_RUNS = 5
_WARM_PASSES = 2
MOST_ROUNDS = 5
# A round of throughput lasts at least this long: who finishes last decides how long it took.
_LEAST_ROUND_S = 0.2

Clock = Callable[[], float]  # seconds


def blocks_of(runs: int) -> tuple[int, ...]:
    """`runs` in at most BLOCKS parts of nearly equal size."""
    ends = [runs * i // BLOCKS for i in range(BLOCKS + 1)]
    return tuple(b - a for a, b in pairwise(ends) if b > a)


def affordable_runs(runs: int, pass_s: float, budget_s: float) -> int:
    """How many of `runs` there is time for, when one run of every engine takes `pass_s`.

    Every block costs one more. Never fewer than FEWEST_RUNS, unless fewer were asked for.
    """
    fitting = int(budget_s / max(pass_s, 1e-9)) - BLOCKS
    return min(runs, max(FEWEST_RUNS, fitting))


@dataclass(slots=True)
class Race:
    """Engines by name; one that fails leaves, and `failed` says why."""

    engines: dict[str, Engine]
    clock: Clock = time.perf_counter
    rest: Callable[[], None] = come_to_rest
    failed: dict[str, str] = field(default_factory=dict)

    def latencies(
        self, batches: Mapping[int, Batch], runs: int, budget_s: float
    ) -> dict[str, tuple[Latency, ...]]:
        """The figures of each engine that is still running, by name.

        `batches` are of one item, by their tokens; each gets a share of the budget that goes by
        its length, and what shorter ones left of theirs.
        """
        found: dict[str, list[Latency]] = {name: [] for name in self.engines}
        end_s, tokens_left = self.clock() + budget_s, sum(batches)
        for tokens, batch in sorted(batches.items()):
            now_s = self.clock()
            share_s = (end_s - now_s) * tokens / tokens_left
            tokens_left -= tokens
            for name, times_s in self._turns(batch, runs, now_s + share_s).items():
                found[name].append(Latency.of(tokens, times_s))
        return {name: tuple(found[name]) for name in self.engines}

    def throughputs(
        self, batch: Batch, passes: Mapping[str, int], budget_s: float
    ) -> dict[str, Throughput]:
        """Items per second of each engine that is still running, by name.

        `passes` says how many passes at once are best for each. The first round warms up, unless
        there is no time for another one.
        """
        end_s = self.clock() + budget_s
        items, tokens = batch.input_ids.shape
        with ThreadPoolExecutor(max(passes.values())) as pool:
            first = {
                name: self._round_s(pool, name, batch, passes[name], 1) for name in self._from(0)
            }
            laps = {name: ceil(_LEAST_ROUND_S / max(took, 1e-6)) for name, took in first.items()}
            rounds: dict[str, list[float]] = {name: [] for name in first}
            due_s = sum(laps[name] * took for name, took in first.items())
            for turn in range(MOST_ROUNDS):
                if self.clock() + due_s > end_s:
                    break
                for name in self._from(turn):
                    took_s = self._round_s(pool, name, batch, passes[name], laps[name])
                    rounds[name].append(took_s / laps[name])
        return {
            name: Throughput(
                items=items,
                tokens=tokens,
                passes=passes[name],
                rounds=len(rounds[name]) or 1,
                items_per_s=items * passes[name] / median(rounds[name] or [first[name]]),
            )
            for name in self.engines
        }

    def _turns(self, batch: Batch, runs: int, end_s: float) -> dict[str, list[float]]:
        """Seconds of every timed pass of each engine."""
        warm_s = {name: self._passes_s(name, batch, _WARM_PASSES) for name in self._from(0)}
        pass_s = sum(times[-1] for times in warm_s.values() if times)
        count = affordable_runs(runs, pass_s, end_s - self.clock())
        times_s: dict[str, list[float]] = {name: [] for name in self.engines}
        for turn, block in enumerate(blocks_of(count)):
            for name in self._from(turn):
                times_s[name] += self._passes_s(name, batch, block)
        return {name: times_s[name] for name in self.engines}

    def _from(self, turn: int) -> list[str]:
        """Who is still running; another one goes first each time."""
        names = list(self.engines)
        first = turn % max(1, len(names))
        return names[first:] + names[:first]

    def _passes_s(self, name: str, batch: Batch, count: int) -> list[float]:
        """Seconds of `count` passes in a row after an untimed one; none when the engine fails."""
        engine, times_s = self.engines[name], list[float]()
        self.rest()
        try:
            engine.run(batch)
            for _ in range(count):
                started_s = self.clock()
                engine.run(batch)
                times_s.append(self.clock() - started_s)
        except EngineFailed as exc:
            self._drop(name, exc)
            return []
        return times_s

    def _round_s(
        self, pool: ThreadPoolExecutor, name: str, batch: Batch, passes: int, laps: int
    ) -> float:
        """Seconds that `passes` threads take for `laps` passes each; 0 when the engine fails."""
        engine = self.engines[name]

        def run() -> None:
            for _ in range(laps):
                engine.run(batch)

        self.rest()
        started_s = self.clock()
        try:
            for future in [pool.submit(run) for _ in range(passes)]:
                future.result()
        except EngineFailed as exc:
            self._drop(name, exc)
            return 0.0
        return self.clock() - started_s

    def _drop(self, name: str, exc: EngineFailed) -> None:
        self.failed[name] = exc.message
        del self.engines[name]
