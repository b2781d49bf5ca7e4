"""Rounds of the benchmark: all systems at all numbers of streams, then the scenarios."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from benchmarks.common.report import format_number, log_progress
from benchmarks.generation.results import AnswerAgreement, SystemResult, name_streams
from benchmarks.generation.scenarios import PromptSampler, Scenario
from benchmarks.generation.streams import (
    DECODE,
    IN_PROCESS,
    THROUGHPUT,
    StreamGroup,
    StreamingSystem,
    StreamRequest,
    StreamResult,
    System,
    run_streams,
)
from build_artifacts.types import Tokens
from deployments.errors import ServeError
from deployments.tuning.measure import wait_until_idle

WARM_UP_TOKENS = 4
# Number of batched answers to sample in each round at each number of streams above 1. Their prompts
# run again unbatched after all rounds, to check that batching does not change answers.
REPEATED_PER_ROUND = 4
UNBATCHED = "unbatched"  # scope of the prefix cache for the repeated prompts

Key = tuple[str, str]  # (part: a number of streams or a scenario, name of the system)
Pairs = list[tuple[StreamResult, StreamResult]]


@dataclass(slots=True)
class GenerationBenchmark:
    """The measurements that every round repeats, and their values so far.

    A baseline that fails is dropped. A failure of `in_process` ends the benchmark.
    """

    in_process: StreamingSystem
    baselines: list[System]
    missing: dict[str, str]  # system -> reason why it is not measured
    prompts: PromptSampler
    rng: random.Random
    streams: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    scenarios: Sequence[Scenario]
    same_model: Collection[str] = ()  # baselines that run the same version of the model
    stream_rounds: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    scenario_rounds: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    batched_answers: list[tuple[Tokens, StreamResult]] = field(default_factory=list)
    answer_pairs: dict[str, Pairs] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Run every system briefly at every number of streams."""
        for streams in self.streams:
            for system in self._systems_for(streams):
                self._run_group(system, self._sample_prompts(streams), WARM_UP_TOKENS)

    def run_round(self, label: str) -> None:
        for streams in self.streams:
            self._run_streams(streams, label)
        for scenario in self.scenarios:
            requests = scenario.sample(self.prompts, self.rng)
            for system in (self.in_process, *self.baselines):
                if isinstance(system, StreamingSystem):
                    self._run_scenario(scenario, system, requests, label)

    @property
    def stream_results(self) -> tuple[SystemResult, ...]:
        return tuple(
            SystemResult.summarize(*key, rounds) for key, rounds in self.stream_rounds.items()
        )

    @property
    def scenario_results(self) -> tuple[SystemResult, ...]:
        return tuple(
            SystemResult.summarize(*key, rounds) for key, rounds in self.scenario_rounds.items()
        )

    def compare_answers(self) -> dict[str, AnswerAgreement]:
        """Compare each baseline with `in_process` on the same prompts. Return results by name."""
        return {
            name: AnswerAgreement.compare(
                f"{name} and {IN_PROCESS}", pairs, must_be_equal=name in self.same_model
            )
            for name, pairs in self.answer_pairs.items()
        }

    def _run_streams(self, streams: int, label: str) -> None:
        prompts = self._sample_prompts(streams)
        reference: StreamGroup | None = None
        for system in self._systems_for(streams):
            group = self._run_group(system, prompts, self.new_tokens)
            if group is None:
                continue
            decode = group.decode_tokens_per_s
            metrics = group.metrics | ({} if decode is None else {DECODE: decode})
            key = (name_streams(streams), system.name)
            self.stream_rounds.setdefault(key, []).append(metrics)
            rate = format_number(metrics.get(DECODE, metrics[THROUGHPUT]), 1)
            log_progress(f"{label}: {system.name}, {key[0]}, {rate} tokens/s")
            if system is self.in_process:
                reference = group
                if streams > 1:
                    answers = list(zip(prompts, group.answers, strict=True))
                    count = min(streams, REPEATED_PER_ROUND)
                    self.batched_answers += self.rng.sample(answers, count)
            elif reference is not None:
                pairs = zip(reference.answers, group.answers, strict=True)
                self.answer_pairs.setdefault(system.name, []).extend(pairs)

    def _run_scenario(
        self,
        scenario: Scenario,
        system: StreamingSystem,
        requests: Sequence[StreamRequest],
        label: str,
    ) -> None:
        wait_until_idle()
        try:
            metrics = system.runner.run(scenario.run(system.generator, requests))
        except ServeError as exc:
            self._drop(system, exc)
            return
        self.scenario_rounds.setdefault((scenario.name, system.name), []).append(metrics)
        values = ", ".join(f"{name} {value:,.1f}" for name, value in metrics.items())
        log_progress(f"{label}: {system.name}, {scenario.name}, {values}")

    def _run_group(
        self, system: System, prompts: Sequence[Tokens], tokens: int
    ) -> StreamGroup | None:
        wait_until_idle()
        try:
            return system.run(prompts, tokens)
        except ServeError as exc:
            self._drop(system, exc)
            return None

    def _drop(self, system: System, error: ServeError) -> None:
        if system is self.in_process:
            raise error
        log_progress(f"{system.name} is dropped: {error.message}")
        self.missing[system.name] = error.message
        self.baselines.remove(system)

    def _systems_for(self, streams: int) -> list[System]:
        """Return the systems that support `streams` concurrent streams, `in_process` first."""
        return [
            system
            for system in (self.in_process, *self.baselines)
            if system.max_streams is None or streams <= system.max_streams
        ]

    def _sample_prompts(self, streams: int) -> tuple[Tokens, ...]:
        return self.prompts.sample_prompts([self.prompt_tokens] * streams)


def repeat_unbatched(benchmark: GenerationBenchmark) -> AnswerAgreement | None:
    """Repeat the sampled prompts one at a time and compare with the batched answers."""
    if not benchmark.batched_answers:
        return None
    # The scope makes the generator prefill the prompts again. The prefix cache still holds those of
    # the last round as the batched run has written them.
    requests = [
        StreamRequest(prompt, benchmark.new_tokens, prefix_cache_scope=UNBATCHED)
        for prompt, _ in benchmark.batched_answers
    ]
    system = benchmark.in_process
    unbatched = system.runner.run(run_streams(system.generator, requests, clients=1))
    batched = [answer for _, answer in benchmark.batched_answers]
    pairs = list(zip(batched, unbatched, strict=True))
    what = f"{IN_PROCESS}, batched and unbatched"
    return AnswerAgreement.compare(what, pairs, must_be_equal=True)
