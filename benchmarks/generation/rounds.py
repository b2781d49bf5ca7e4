"""The rounds: every contender at every number of streams, then every scenario of every service."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.report import format_number, log_progress
from benchmarks.generation.results import AnswerAgreement, SystemResult, streams_part
from benchmarks.generation.scenarios import PromptSampler, Scenario
from benchmarks.generation.streams import (
    DECODE,
    IN_PROCESS,
    WHOLE,
    StreamGroup,
    StreamingSystem,
    StreamRequest,
    StreamResult,
    System,
    Tokens,
    run_streams,
)
from deployments.errors import ServeError
from deployments.tuning.measure import wait_until_idle

WARM_UP_TOKENS = 4
COMPARED_PER_LEVEL = 4  # answers in company that are asked for again alone

Key = tuple[str, str]  # part, contender
Pairs = list[tuple[StreamResult, StreamResult]]


@dataclass(slots=True)
class GenerationBenchmark:
    """What is measured in every round, and what the rounds have given so far.

    Whoever of the others fails is not asked again; that we fail ourselves is an error.
    """

    ours: StreamingSystem
    others: list[System]
    missing: dict[str, str]  # contender -> why
    book: PromptSampler
    rng: random.Random
    streams: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    scenarios: Sequence[Scenario]
    levels_found: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    scenarios_found: dict[Key, list[dict[str, float]]] = field(default_factory=dict)
    batched_answers: list[tuple[Tokens, StreamResult]] = field(default_factory=list)
    beside_ours: dict[str, Pairs] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Everybody at every number of streams, shortly."""
        for streams in self.streams:
            for contender in self._taking(streams):
                self._heat(contender, self._prompts(streams), WARM_UP_TOKENS)

    def run_round(self, label: str) -> None:
        """Every level, then every scenario."""
        for streams in self.streams:
            self._level(streams, label)
        for scenario in self.scenarios:
            asks = scenario.draw(self.book, self.rng)
            for contender in (self.ours, *self.others):
                if isinstance(contender, StreamingSystem):
                    self._scenario(scenario, contender, asks, label)

    @property
    def levels(self) -> tuple[SystemResult, ...]:
        """Summaries of all rounds."""
        return tuple(SystemResult.of(*key, rounds) for key, rounds in self.levels_found.items())

    @property
    def scenario_results(self) -> tuple[SystemResult, ...]:
        """Likewise, of the scenarios."""
        return tuple(SystemResult.of(*key, rounds) for key, rounds in self.scenarios_found.items())

    @property
    def answer_agreements(self) -> tuple[AnswerAgreement, ...]:
        """The others' answers beside ours to the same prompts."""
        pairs = self.beside_ours.items()
        return tuple(
            AnswerAgreement.of(f"{name} beside {IN_PROCESS}", found) for name, found in pairs
        )

    def _level(self, streams: int, label: str) -> None:
        prompts = self._prompts(streams)
        our_heat: StreamGroup | None = None
        for contender in self._taking(streams):
            heat = self._heat(contender, prompts, self.new_tokens)
            if heat is None:
                continue
            decode = heat.decode_tokens_per_s
            figures = heat.figures | ({} if decode is None else {DECODE: decode})
            key = (streams_part(streams), contender.name)
            self.levels_found.setdefault(key, []).append(figures)
            rate = format_number(figures.get(DECODE, figures[WHOLE]), 1)
            log_progress(f"{label}: {contender.name}, {key[0]}, {rate} tokens/s")
            if contender is self.ours:
                our_heat = heat
                if streams > 1:
                    kept = list(zip(prompts, heat.answers, strict=True))
                    self.batched_answers += self.rng.sample(kept, min(streams, COMPARED_PER_LEVEL))
            elif our_heat is not None:
                pairs = zip(our_heat.answers, heat.answers, strict=True)
                self.beside_ours.setdefault(contender.name, []).extend(pairs)

    def _scenario(
        self,
        scenario: Scenario,
        contender: StreamingSystem,
        asks: Sequence[StreamRequest],
        label: str,
    ) -> None:
        wait_until_idle()
        try:
            figures = contender.runner.run(scenario.run(contender.service, asks))
        except ServeError as exc:
            self._give_up(contender, exc)
            return
        self.scenarios_found.setdefault((scenario.name, contender.name), []).append(figures)
        told = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items())
        log_progress(f"{label}: {contender.name}, {scenario.name}, {told}")

    def _heat(
        self, contender: System, prompts: Sequence[Tokens], tokens: int
    ) -> StreamGroup | None:
        wait_until_idle()
        try:
            return contender.run(prompts, tokens)
        except ServeError as exc:
            self._give_up(contender, exc)
            return None

    def _give_up(self, contender: System, error: ServeError) -> None:
        if contender is self.ours:
            raise error
        log_progress(f"{contender.name} is not measured further: {error.message}")
        self.missing[contender.name] = error.message
        self.others.remove(contender)

    def _taking(self, streams: int) -> list[System]:
        """Who can be asked for so many at once, us first."""
        return [
            contender
            for contender in (self.ours, *self.others)
            if contender.max_streams is None or streams <= contender.max_streams
        ]

    def _prompts(self, streams: int) -> tuple[Tokens, ...]:
        return self.book.sample_prompts([self.prompt_tokens] * streams)


def repeat_unbatched(benchmark: GenerationBenchmark) -> AnswerAgreement | None:
    """The kept answers in company beside those that the same prompts get alone."""
    if not benchmark.batched_answers:
        return None
    asks = [StreamRequest(prompt, benchmark.new_tokens) for prompt, _ in benchmark.batched_answers]
    ours = benchmark.ours
    alone = ours.runner.run(run_streams(ours.service, asks, readers=1))
    pairs = [(one, again) for (_, one), again in zip(benchmark.batched_answers, alone, strict=True)]
    return AnswerAgreement.of(f"{IN_PROCESS} in company beside alone", pairs)
