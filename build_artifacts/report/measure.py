"""Measurement of stages: accuracy against the reference, latency and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import median

from build_artifacts.evaluation import Evaluation, score_engine
from build_artifacts.report.stages import Stage
from build_artifacts.report.values import StageLatency, StageResult, StageThroughput
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Device, ModelHead
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine
from deployments.engines.forward_pass import Batch
from deployments.errors import EngineFailed
from deployments.tuning.host import free_bytes
from deployments.tuning.measure import ClockFunction, wait_until_idle
from deployments.tuning.parity import ReferenceOutputs, compare_outputs, run_probes

BLOCKS = 5  # parts of the runs of each engine; engines take turns after each part
MIN_RUNS = 5  # minimum runs per engine and length, even if they exceed the time budget
_WARM_PASSES = 2  # timed passes per engine and length, to estimate the time of a run
MAX_ROUNDS = 5  # rounds of the throughput measurement per engine, without the warm-up
# A round ends with its slowest thread, so a short round would measure thread start times.
_MIN_ROUND_S = 0.2


def split_runs(runs: int) -> tuple[int, ...]:
    """Split `runs` into at most BLOCKS parts of nearly equal size."""
    ends = [runs * i // BLOCKS for i in range(BLOCKS + 1)]
    return tuple(b - a for a, b in pairwise(ends) if b > a)


def fit_runs(runs: int, pass_s: float, budget_s: float) -> int:
    """Limit `runs` to the time budget. `pass_s` is the total time of one run of every engine.

    Each of the BLOCKS has one additional untimed run. The result is at least the smaller of `runs`
    and MIN_RUNS.
    """
    fitting = int(budget_s / max(pass_s, 1e-9)) - BLOCKS
    return min(runs, max(MIN_RUNS, fitting))


@dataclass(slots=True)
class InterleavedTimer:
    """Timer of engines in turns, so that changes of the host's speed affect all engines alike.

    An engine that fails moves from `engines` to `failed`, which has the reason.
    """

    engines: dict[str, EncoderEngine]
    clock: ClockFunction = time.perf_counter
    wait: Callable[[], None] = wait_until_idle  # called before every block of passes
    failed: dict[str, str] = field(default_factory=dict)

    def time_latencies(
        self, batches: Mapping[int, Batch], runs: int, budget_s: float
    ) -> dict[str, tuple[StageLatency, ...]]:
        """Time sequential passes. Return latencies by engine name, without engines that failed.

        `batches` maps a number of tokens to a batch of one item. A batch gets a share of the
        remaining budget in proportion to its tokens.
        """
        latencies: dict[str, list[StageLatency]] = {name: [] for name in self.engines}
        end_s, tokens_left = self.clock() + budget_s, sum(batches)
        for tokens, batch in sorted(batches.items()):
            now_s = self.clock()
            share_s = (end_s - now_s) * tokens / tokens_left
            tokens_left -= tokens
            for name, times_s in self._time_passes(batch, runs, now_s + share_s).items():
                latencies[name].append(StageLatency.of(tokens, times_s))
        return {name: tuple(latencies[name]) for name in self.engines}

    def time_throughputs(
        self, batch: Batch, passes: Mapping[str, int], budget_s: float
    ) -> dict[str, StageThroughput]:
        """Time concurrent passes. Return throughputs by engine name, without engines that failed.

        `passes` is the number of concurrent passes by engine. The first round is a warm-up. Its
        time counts only if the budget allows no other round.
        """
        end_s = self.clock() + budget_s
        items, tokens = batch.input_ids.shape
        with ThreadPoolExecutor(max(passes.values())) as pool:
            first = {
                name: self._time_round(pool, name, batch, passes[name], 1)
                for name in self._turn_order(0)
            }
            repeats = {name: ceil(_MIN_ROUND_S / max(s, 1e-6)) for name, s in first.items()}
            rounds: dict[str, list[float]] = {name: [] for name in first}
            expected_s = sum(repeats[name] * first_s for name, first_s in first.items())
            for turn in range(MAX_ROUNDS):
                if self.clock() + expected_s > end_s:
                    break
                for name in self._turn_order(turn):
                    round_s = self._time_round(pool, name, batch, passes[name], repeats[name])
                    rounds[name].append(round_s / repeats[name])
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

    def _time_passes(self, batch: Batch, runs: int, end_s: float) -> dict[str, list[float]]:
        """Return the seconds of every timed pass by engine, without engines that failed."""
        warm_s = {name: self._time_block(name, batch, _WARM_PASSES) for name in self._turn_order(0)}
        pass_s = sum(times[-1] for times in warm_s.values() if times)
        count = fit_runs(runs, pass_s, end_s - self.clock())
        times_s: dict[str, list[float]] = {name: [] for name in self.engines}
        for turn, block in enumerate(split_runs(count)):
            for name in self._turn_order(turn):
                times_s[name] += self._time_block(name, batch, block)
        return {name: times_s[name] for name in self.engines}

    def _turn_order(self, turn: int) -> list[str]:
        """List the running engines, rotated by `turn` so that the first one changes every turn."""
        names = list(self.engines)
        first = turn % max(1, len(names))
        return names[first:] + names[:first]

    def _time_block(self, name: str, batch: Batch, count: int) -> list[float]:
        """Time `count` passes after an untimed pass. Return an empty list if the engine fails."""
        engine, times_s = self.engines[name], list[float]()
        self.wait()
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

    def _time_round(
        self, pool: ThreadPoolExecutor, name: str, batch: Batch, passes: int, repeats: int
    ) -> float:
        """Return the seconds of `repeats` passes in each of `passes` threads; 0 after a failure."""
        engine = self.engines[name]

        def run() -> None:
            for _ in range(repeats):
                engine.run(batch)

        self.wait()
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


_LATENCY_SHARE = 0.7  # share of the time budget; throughput gets the remainder
_OPEN_PER_BYTE = 3  # memory of an open stage per byte of its weights
_MEMORY_SHARE = 0.7  # share of the free memory, for all open stages


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementInputs:
    """Inputs and budget of a measurement, the same for every stage."""

    reference: ReferenceOutputs
    head: ModelHead
    gate: Gate
    evaluation: Evaluation | None
    single_items: Mapping[int, Batch]  # batches of one item, by its number of tokens
    full_batch: Batch
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StageAccuracy:
    """Similarity to the reference, and task metrics; `scores` is empty without labeled data."""

    cosine: float
    agreement: float | None
    scores: Mapping[str, float]


@dataclass(slots=True)
class StageMeasurement:
    """Measurement of stages. `failed` has the reason for each missing measurement."""

    inputs: MeasurementInputs
    steps: StepRunner
    failed: dict[str, str] = field(default_factory=dict)

    def measure(self, stages: Sequence[Stage]) -> list[StageResult]:
        """Measure the stages in turns. Return the results in order, without speed-ups.

        If memory does not suffice for all stages, they are measured in groups.
        """
        results: list[StageResult] = []
        for group in group_by_memory(stages, free_bytes(Device.CPU)):
            results += self._measure_group(group, self.inputs.seconds * len(group) / len(stages))
        return results

    def _measure_group(self, stages: Sequence[Stage], seconds: float) -> Iterator[StageResult]:
        with self._open_engines(stages, {s.name: s.single_pass for s in stages}) as engines:
            accuracies = self._verify_all(engines)
            latencies = self._time_latencies(engines, seconds * _LATENCY_SHARE)
        stages = [stage for stage in stages if stage.name in latencies]
        with self._open_engines(stages, {s.name: s.throughput for s in stages}) as engines:
            passes = {s.name: s.throughput.concurrent_passes for s in stages}
            throughputs = self._time_throughputs(engines, passes, seconds * (1 - _LATENCY_SHARE))
        for name in [name for name in latencies if name in self.failed]:
            self.failed[f"the throughput of {name}"] = self.failed.pop(name)
        for stage in stages:
            accuracy = accuracies[stage.name]
            yield StageResult(
                name=stage.name,
                what=stage.what,
                is_baseline_path=stage.is_baseline_path,
                size_bytes=stage.size_bytes,
                cosine=accuracy.cosine,
                agreement=accuracy.agreement,
                batched_cosine_worst=_worst(p.batched_cosine_worst for p in stage.parities),
                batched_top1_agreement=_worst(p.batched_top1_agreement for p in stage.parities),
                scores=dict(accuracy.scores or stage.scores),
                latencies=latencies[stage.name],
                throughput=throughputs.get(stage.name),
            )

    @contextmanager
    def _open_engines(
        self, stages: Sequence[Stage], modes: Mapping[str, EncoderSettings]
    ) -> Iterator[dict[str, EncoderEngine]]:
        """Open the engine of every stage and yield the opened engines. Close them at the end.

        Stages whose engine cannot be opened go to `failed`.
        """
        engines: dict[str, EncoderEngine] = {}
        opened: list[EncoderEngine] = []
        try:
            with self.steps.run_uncached("open", _join(modes)):
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
            engines.clear()  # the caller keeps the dict: drop the engines to free their memory

    def _verify_all(self, engines: dict[str, EncoderEngine]) -> dict[str, StageAccuracy]:
        """Measure the accuracy of each engine. Remove failed engines from `engines`."""
        accuracies: dict[str, StageAccuracy] = {}
        for name, engine in list(engines.items()):
            with self.steps.run_uncached("compare", f"{name} against the reference") as step:
                try:
                    accuracies[name] = self._verify(engine)
                    step.set_outcome(f"cosine {accuracies[name].cosine:.4f} mean")
                except EngineFailed as exc:
                    self.failed[name] = exc.message
                    del engines[name]
                    step.set_outcome(f"left out, {exc.message}")
        return accuracies

    def _verify(self, engine: EncoderEngine) -> StageAccuracy:
        inputs = self.inputs
        # Run one item per pass. The build already compared batched outputs, and batches of mixed
        # lengths would take most of the time here.
        outputs = run_probes(engine, inputs.reference.items, 1)
        result = compare_outputs(inputs.reference, outputs, outputs, inputs.gate, inputs.head)
        if result.parity is None:
            raise EngineFailed("; ".join(result.reasons))
        scores = {} if inputs.evaluation is None else score_engine(engine, inputs.evaluation)
        return StageAccuracy(result.parity.cosine_mean, result.parity.top1_agreement, scores)

    def _time_latencies(
        self, engines: dict[str, EncoderEngine], seconds: float
    ) -> dict[str, tuple[StageLatency, ...]]:
        timer = InterleavedTimer(dict(engines))
        with self.steps.run_uncached("time", f"one item, {_join(engines)}") as step:
            latencies = timer.time_latencies(self.inputs.single_items, self.inputs.runs, seconds)
            runs = {row.tokens: row.runs for rows in latencies.values() for row in rows}
            step.set_outcome(", ".join(f"{n} runs of {tokens}" for tokens, n in runs.items()))
        self.failed |= timer.failed
        return latencies

    def _time_throughputs(
        self, engines: dict[str, EncoderEngine], passes: Mapping[str, int], seconds: float
    ) -> dict[str, StageThroughput]:
        if not engines:
            return {}
        timer = InterleavedTimer(dict(engines))
        items = len(self.inputs.full_batch.lengths)
        with self.steps.run_uncached("time", f"{items} items, {_join(engines)}"):
            throughputs = timer.time_throughputs(self.inputs.full_batch, passes, seconds)
        self.failed |= timer.failed
        return throughputs


def group_by_memory(stages: Sequence[Stage], available_bytes: int) -> list[list[Stage]]:
    """Group the stages in order. A group has as many stages as memory allows, at least one."""
    groups: list[list[Stage]] = []
    used_bytes = 0
    for stage in stages:
        stage_bytes = stage.size_bytes * _OPEN_PER_BYTE
        if not groups or used_bytes + stage_bytes > available_bytes * _MEMORY_SHARE:
            groups.append([])
            used_bytes = 0
        groups[-1].append(stage)
        used_bytes += stage_bytes
    return groups


def _worst(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _join(names: Mapping[str, object]) -> str:
    return ", ".join(names)
