"""Stages opened side by side, held against the reference, scored and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from build_artifacts.evaluation import Evaluation, scores_of
from build_artifacts.journey.figures import Latency, StageFigures, Throughput
from build_artifacts.journey.race import Race
from build_artifacts.journey.stages import Stage
from build_artifacts.steprunner import StepRunner
from deployments.config import LaneSettings
from deployments.engines import Engine
from deployments.errors import EngineFailed
from deployments.manifest import Device, Gate, Head
from deployments.messages import Batch
from deployments.tuning.memory import free_bytes
from deployments.tuning.parity import Reference, answers, judge

# Of the time for passes, what the sequential ones get; the rest is for full batches.
_LATENCY_SHARE = 0.7
# What an open stage takes per byte of its weights, and of the free memory what all may take.
_OPEN_PER_BYTE = 3
_MEMORY_SHARE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What every stage has to run."""

    reference: Reference
    head: Head
    gate: Gate
    evaluation: Evaluation | None
    alone: Mapping[int, Batch]  # one item each, by its tokens
    crowd: Batch
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How right a stage is; `scores` are empty where no data was given."""

    cosine: float
    agreement: float | None
    scores: Mapping[str, float]


@dataclass(slots=True)
class Survey:
    """The figures of stages; `failed` names those that gave up, and why."""

    course: Course
    steps: StepRunner
    failed: dict[str, str] = field(default_factory=dict)

    def figures(self, stages: Sequence[Stage]) -> list[StageFigures]:
        """Of every stage that did not fail, in order; without their speed-ups.

        All stages take turns, unless there is not enough memory for all of them at once.
        """
        found: list[StageFigures] = []
        for group in groups_of(stages, free_bytes(Device.CPU)):
            found += self._together(group, self.course.seconds * len(group) / len(stages))
        return found

    def _together(self, stages: Sequence[Stage], seconds: float) -> Iterator[StageFigures]:
        with self._opened(stages, {s.name: s.alone for s in stages}) as engines:
            qualities = self._qualities(engines)
            latencies = self._latencies(engines, seconds * _LATENCY_SHARE)
        stages = [stage for stage in stages if stage.name in latencies]
        with self._opened(stages, {s.name: s.crowd for s in stages}) as engines:
            passes = {s.name: s.crowd.runs for s in stages}
            throughputs = self._throughputs(engines, passes, seconds * (1 - _LATENCY_SHARE))
        for stage in stages:
            quality = qualities[stage.name]
            yield StageFigures(
                name=stage.name,
                what=stage.what,
                in_journey=stage.in_journey,
                size_bytes=stage.size_bytes,
                cosine=quality.cosine,
                agreement=quality.agreement,
                scores=dict(quality.scores or stage.scores),
                latencies=latencies[stage.name],
                throughput=throughputs.get(stage.name),
            )

    @contextmanager
    def _opened(
        self, stages: Sequence[Stage], lanes: Mapping[str, LaneSettings]
    ) -> Iterator[dict[str, Engine]]:
        """An engine of every stage that can be opened, closed on the way out."""
        engines: dict[str, Engine] = {}
        opened: list[Engine] = []
        try:
            with self.steps.passing("open", _listed(lanes)):
                for stage in stages:
                    try:
                        engines[stage.name] = stage.open(lanes[stage.name])
                    except EngineFailed as exc:
                        self.failed[stage.name] = exc.message
                        continue
                    opened.append(engines[stage.name])
            yield engines
        finally:
            for engine in opened:
                engine.close()
            engines.clear()  # the next ones need the memory, and the caller still holds this

    def _qualities(self, engines: dict[str, Engine]) -> dict[str, Quality]:
        """How right each engine is; those that are not right at all leave `engines`."""
        found: dict[str, Quality] = {}
        for name, engine in list(engines.items()):
            with self.steps.passing("verify", f"{name} against the reference") as step:
                try:
                    found[name] = self._quality(engine)
                    step.found(f"cosine {found[name].cosine:.4f} mean")
                except EngineFailed as exc:
                    self.failed[name] = exc.message
                    del engines[name]
                    step.found(f"left out, {exc.message}")
        return found

    def _quality(self, engine: Engine) -> Quality:
        course = self.course
        # Company is the build's to judge, and the mixed lengths of its batches cost most.
        alone = answers(engine, course.reference.items, 1)
        verdict = judge(course.reference, alone, alone, course.gate, course.head)
        if verdict.parity is None:
            raise EngineFailed("; ".join(verdict.reasons))
        scores = {} if course.evaluation is None else scores_of(engine, course.evaluation)
        return Quality(verdict.parity.cosine_mean, verdict.parity.top1_agreement, scores)

    def _latencies(
        self, engines: dict[str, Engine], seconds: float
    ) -> dict[str, tuple[Latency, ...]]:
        race = Race(dict(engines))
        with self.steps.passing("time", f"one item, {_listed(engines)}") as step:
            found = race.latencies(self.course.alone, self.course.runs, seconds)
            runs = {one.tokens: one.runs for times in found.values() for one in times}
            step.found(", ".join(f"{n} runs of {tokens}" for tokens, n in runs.items()))
        self.failed |= race.failed
        return found

    def _throughputs(
        self, engines: dict[str, Engine], passes: Mapping[str, int], seconds: float
    ) -> dict[str, Throughput]:
        if not engines:
            return {}
        race = Race(dict(engines))
        items = len(self.course.crowd.lengths)
        with self.steps.passing("time", f"{items} items, {_listed(engines)}"):
            found = race.throughputs(self.course.crowd, passes, seconds)
        self.failed |= race.failed
        return found


def groups_of(stages: Sequence[Stage], room_bytes: int) -> list[list[Stage]]:
    """The stages in order, as many together as have room; one at least."""
    groups: list[list[Stage]] = []
    taken = 0
    for stage in stages:
        needed = stage.size_bytes * _OPEN_PER_BYTE
        if not groups or taken + needed > room_bytes * _MEMORY_SHARE:
            groups.append([])
            taken = 0
        groups[-1].append(stage)
        taken += needed
    return groups


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names)
