"""Measurement of stages: accuracy against the reference, latency and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import median

from build_artifacts.evaluation import Evaluation, score_engine
from build_artifacts.report.stages import Stage
from build_artifacts.report.values import StageLatency, StageResult, StageThroughput
from build_artifacts.storage.workspace import StepRunner
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device, ModelHead
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine
from deployments.errors import EngineFailed
from deployments.messages import Batch
from deployments.tuning.host import free_bytes
from deployments.tuning.measure import wait_until_idle
from deployments.tuning.parity import ReferenceOutputs, compare_outputs, run_probes

BLOCKS = 5
MIN_RUNS = 5
_WARM_PASSES = 2
MAX_ROUNDS = 5
# A round of throughput lasts at least this long: who finishes last decides how long it took.
_MIN_ROUND_S = 0.2

ClockFunction = Callable[[], float]  # seconds


def split_runs(runs: int) -> tuple[int, ...]:
    """`runs` in at most BLOCKS parts of nearly equal size."""
    ends = [runs * i // BLOCKS for i in range(BLOCKS + 1)]
    return tuple(b - a for a, b in pairwise(ends) if b > a)


def affordable_runs(runs: int, pass_s: float, budget_s: float) -> int:
    """How many of `runs` there is time for, when one run of every engine takes `pass_s`.

    Every block costs one more. Never fewer than MIN_RUNS, unless fewer were asked for.
    """
    fitting = int(budget_s / max(pass_s, 1e-9)) - BLOCKS
    return min(runs, max(MIN_RUNS, fitting))


@dataclass(slots=True)
class InterleavedTimer:
    """Engines by name; one that fails leaves, and `failed` says why."""

    engines: dict[str, EncoderEngine]
    clock: ClockFunction = time.perf_counter
    rest: Callable[[], None] = wait_until_idle
    failed: dict[str, str] = field(default_factory=dict)

    def latencies(
        self, batches: Mapping[int, Batch], runs: int, budget_s: float
    ) -> dict[str, tuple[StageLatency, ...]]:
        """The figures of each engine that is still running, by name.

        `batches` are of one item, by their tokens; each gets a share of the budget that goes by
        its length, and what shorter ones left of theirs.
        """
        found: dict[str, list[StageLatency]] = {name: [] for name in self.engines}
        end_s, tokens_left = self.clock() + budget_s, sum(batches)
        for tokens, batch in sorted(batches.items()):
            now_s = self.clock()
            share_s = (end_s - now_s) * tokens / tokens_left
            tokens_left -= tokens
            for name, times_s in self._turns(batch, runs, now_s + share_s).items():
                found[name].append(StageLatency.of(tokens, times_s))
        return {name: tuple(found[name]) for name in self.engines}

    def throughputs(
        self, batch: Batch, passes: Mapping[str, int], budget_s: float
    ) -> dict[str, StageThroughput]:
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
            laps = {name: ceil(_MIN_ROUND_S / max(took, 1e-6)) for name, took in first.items()}
            rounds: dict[str, list[float]] = {name: [] for name in first}
            due_s = sum(laps[name] * took for name, took in first.items())
            for turn in range(MAX_ROUNDS):
                if self.clock() + due_s > end_s:
                    break
                for name in self._from(turn):
                    took_s = self._round_s(pool, name, batch, passes[name], laps[name])
                    rounds[name].append(took_s / laps[name])
        return {
            name: StageThroughput(
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
        for turn, block in enumerate(split_runs(count)):
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


# Of the time for passes, what the sequential ones get; the rest is for full batches.
_LATENCY_SHARE = 0.7
# What an open stage takes per byte of its weights, and of the free memory what all may take.
_OPEN_PER_BYTE = 3
_MEMORY_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementInputs:
    """What every stage has to run."""

    reference: ReferenceOutputs
    head: ModelHead
    gate: Gate
    evaluation: Evaluation | None
    alone: Mapping[int, Batch]  # one item each, by its tokens
    crowd: Batch
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageAccuracy:
    """How right a stage is; `scores` are empty where no data was given."""

    cosine: float
    agreement: float | None
    scores: Mapping[str, float]


@dataclass(slots=True)
class StageMeasurement:
    """The figures of stages; `failed` names those that gave up, and why."""

    inputs: MeasurementInputs
    steps: StepRunner
    failed: dict[str, str] = field(default_factory=dict)

    def figures(self, stages: Sequence[Stage]) -> list[StageResult]:
        """Of every stage that did not fail, in order; without their speed-ups.

        All stages take turns, unless there is not enough memory for all of them at once.
        """
        found: list[StageResult] = []
        for group in group_by_memory(stages, free_bytes(Device.CPU)):
            found += self._together(group, self.inputs.seconds * len(group) / len(stages))
        return found

    def _together(self, stages: Sequence[Stage], seconds: float) -> Iterator[StageResult]:
        with self._opened(stages, {s.name: s.alone for s in stages}) as engines:
            qualities = self._qualities(engines)
            latencies = self._latencies(engines, seconds * _LATENCY_SHARE)
        stages = [stage for stage in stages if stage.name in latencies]
        with self._opened(stages, {s.name: s.crowd for s in stages}) as engines:
            passes = {s.name: s.crowd.concurrent_passes for s in stages}
            throughputs = self._throughputs(engines, passes, seconds * (1 - _LATENCY_SHARE))
        for stage in stages:
            quality = qualities[stage.name]
            yield StageResult(
                name=stage.name,
                what=stage.what,
                is_baseline_path=stage.is_baseline_path,
                size_bytes=stage.size_bytes,
                cosine=quality.cosine,
                agreement=quality.agreement,
                scores=dict(quality.scores or stage.scores),
                latencies=latencies[stage.name],
                throughput=throughputs.get(stage.name),
            )

    @contextmanager
    def _opened(
        self, stages: Sequence[Stage], modes: Mapping[str, EncoderSettings]
    ) -> Iterator[dict[str, EncoderEngine]]:
        """An engine of every stage that can be opened, closed on the way out."""
        engines: dict[str, EncoderEngine] = {}
        opened: list[EncoderEngine] = []
        try:
            with self.steps.run_uncached("open", _listed(modes)):
                for stage in stages:
                    try:
                        engines[stage.name] = stage.open(modes[stage.name])
                    except EngineFailed as exc:
                        self.failed[stage.name] = exc.message
                        continue
                    opened.append(engines[stage.name])
            yield engines
        finally:
            for engine in opened:
                engine.close()
            engines.clear()  # the next ones need the memory, and the caller still holds this

    def _qualities(self, engines: dict[str, EncoderEngine]) -> dict[str, StageAccuracy]:
        """How right each engine is; those that are not right at all leave `engines`."""
        found: dict[str, StageAccuracy] = {}
        for name, engine in list(engines.items()):
            with self.steps.run_uncached("verify", f"{name} against the reference") as step:
                try:
                    found[name] = self._quality(engine)
                    step.set_outcome(f"cosine {found[name].cosine:.4f} mean")
                except EngineFailed as exc:
                    self.failed[name] = exc.message
                    del engines[name]
                    step.set_outcome(f"left out, {exc.message}")
        return found

    def _quality(self, engine: EncoderEngine) -> StageAccuracy:
        inputs = self.inputs
        # Company is the build's to judge, and the mixed lengths of its batches cost most.
        alone = run_probes(engine, inputs.reference.items, 1)
        verdict = compare_outputs(inputs.reference, alone, alone, inputs.gate, inputs.head)
        if verdict.parity is None:
            raise EngineFailed("; ".join(verdict.reasons))
        scores = {} if inputs.evaluation is None else score_engine(engine, inputs.evaluation)
        return StageAccuracy(verdict.parity.cosine_mean, verdict.parity.top1_agreement, scores)

    def _latencies(
        self, engines: dict[str, EncoderEngine], seconds: float
    ) -> dict[str, tuple[StageLatency, ...]]:
        race = InterleavedTimer(dict(engines))
        with self.steps.run_uncached("time", f"one item, {_listed(engines)}") as step:
            found = race.latencies(self.inputs.alone, self.inputs.runs, seconds)
            runs = {one.tokens: one.runs for times in found.values() for one in times}
            step.set_outcome(", ".join(f"{n} runs of {tokens}" for tokens, n in runs.items()))
        self.failed |= race.failed
        return found

    def _throughputs(
        self, engines: dict[str, EncoderEngine], passes: Mapping[str, int], seconds: float
    ) -> dict[str, StageThroughput]:
        if not engines:
            return {}
        race = InterleavedTimer(dict(engines))
        items = len(self.inputs.crowd.lengths)
        with self.steps.run_uncached("time", f"{items} items, {_listed(engines)}"):
            found = race.throughputs(self.inputs.crowd, passes, seconds)
        self.failed |= race.failed
        return found


def group_by_memory(stages: Sequence[Stage], available_bytes: int) -> list[list[Stage]]:
    """The stages in order, as many together as have room; one at least."""
    groups: list[list[Stage]] = []
    taken = 0
    for stage in stages:
        needed = stage.size_bytes * _OPEN_PER_BYTE
        if not groups or taken + needed > available_bytes * _MEMORY_SHARE:
            groups.append([])
            taken = 0
        groups[-1].append(stage)
        taken += needed
    return groups


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names)
