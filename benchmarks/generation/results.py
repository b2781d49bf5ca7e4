"""What text generation is to reach, as ratios within one run and as waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import format_number
from benchmarks.common.statistics import Goal, RoundSummary, summarize
from benchmarks.generation.scenarios import JOIN_GAP, STREAMS, ChurnResults, LongPromptScenario
from benchmarks.generation.streams import (
    DECODE,
    GENAI,
    IN_PROCESS,
    INTER_TOKEN,
    INTER_TOKEN_MAX,
    INTER_TOKEN_P99,
    NO_DRAFTS,
    OVER_HTTP,
    TRANSFORMERS,
    TTFT,
    WHOLE,
    StreamResult,
)
from benchmarks.generation.structured_output import SchemaResults
from build_artifacts.console import columns
from build_artifacts.decoders.generation_report import common_prefix_length

_TABLE = (DECODE, WHOLE, TTFT, INTER_TOKEN, INTER_TOKEN_P99, INTER_TOKEN_MAX)

Rounds = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One contender in one part of the run: so many streams, or a scenario."""

    part: str
    contender: str
    figures: Mapping[str, RoundSummary]  # over the rounds; those that every round gave

    @classmethod
    def of(cls, part: str, contender: str, rounds: Rounds) -> Self:
        """The summary of all rounds, one at least."""
        names = [name for name in rounds[0] if all(name in one for one in rounds)]
        return cls(part, contender, {n: summarize([one[n] for one in rounds]) for n in names})


@dataclass(frozen=True, slots=True)
class AnswerAgreement:
    """How alike two ways to answer the same prompts are."""

    what: str
    compared: int
    same: int  # answers, from the first token to the last
    leading_tokens: float | None  # equal ones at the beginning, on average; None: only text is told

    @classmethod
    def of(cls, what: str, pairs: Sequence[tuple[StreamResult, StreamResult]]) -> Self:
        """Of answers with their tokens, or with nothing but text."""
        if all(one.ids and other.ids for one, other in pairs):
            leads = [common_prefix_length(one.ids, other.ids) for one, other in pairs]
            same = sum(one.ids == other.ids for one, other in pairs)
            return cls(what, len(pairs), same, sum(leads) / len(leads))
        return cls(what, len(pairs), sum(one.text == other.text for one, other in pairs), None)

    @property
    def sentence(self) -> str:
        """For people."""
        told = f"{self.what}: {self.same} of {self.compared} answers are the same"
        if self.leading_tokens is None:
            return told
        return f"{told}, {self.leading_tokens:.1f} leading tokens on average"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResults:
    """Everything the result file says beside the run's facts."""

    model_id: str
    version: str
    compute_type: str
    threads: int
    prompt_tokens: int  # of the levels
    new_tokens: int
    levels: tuple[SystemResult, ...]
    scenarios: tuple[SystemResult, ...]
    churn: ChurnResults | None
    schemas: SchemaResults | None
    alone: AnswerAgreement | None  # our answers in company beside those alone
    answer_agreements: tuple[AnswerAgreement, ...]  # the others' beside ours
    notes: tuple[str, ...]  # on how far they can be compared
    packages: Mapping[str, str]
    missing: Mapping[str, str]  # contender -> why it was not measured, or not to the end
    ratios: Mapping[str, RoundSummary]
    goals: tuple[Goal, ...]


def streams_part(streams: int) -> str:
    """The name of a level."""
    return f"{streams} streams" if streams > 1 else "1 stream"


def require_correct(figures: GenerationResults) -> None:
    """Raises BenchmarkError when our answers depend on company, break a schema, or leak."""
    alone = figures.alone
    if alone is not None and alone.same < alone.compared:
        raise BenchmarkError(
            f"wrong answers, so the figures mean nothing: {alone.sentence}",
            hint="a row's answer must not depend on the others: see tests of the loop",
        )
    churned = figures.churn
    if churned is not None and not churned.is_clean:
        raise BenchmarkError(
            f"after churn {churned.still_active} rows are in use and {churned.still_waiting} "
            f"requests wait; {churned.different} of {churned.compared} answers are wrong",
            hint="look at how the loop lets go of rows",
        )
    filled = figures.schemas
    if filled is not None and filled.wrong:
        raise BenchmarkError(
            f"{filled.wrong} of {filled.asked} answers break their schemas",
            hint="the lines above say where: see tests of the grammar",
        )


def describe(figures: GenerationResults) -> str:
    """The result for people."""
    lines = [
        f"{figures.model_id} {figures.version} {figures.compute_type}, {figures.threads} threads, "
        f"prompts of {figures.prompt_tokens} tokens, answers of {figures.new_tokens}",
        "",
    ]
    if figures.levels:
        header = ["", "", *_TABLE, "spread"]
        lines += [columns([header, *map(_level_row, figures.levels)], right=True), ""]
    if figures.scenarios:
        header = ["", "", "figure", "median", "lowest", "highest"]
        rows = [row for one in figures.scenarios for row in _scenario_rows(one)]
        lines += [columns([header, *rows], right=True), ""]
    if (churned := figures.churn) is not None:
        lines.append(
            f"churn: {churned.requests} requests in {churned.seconds:.1f} s, {churned.left} left; "
            f"{churned.different} of {churned.compared} answers wrong, {churned.memory_growth_mb:+.1f} MB"
        )
    if figures.schemas is not None:
        lines += [figures.schemas.sentence, *figures.schemas.faults]
    answer_agreements = [*([figures.alone] if figures.alone else []), *figures.answer_agreements]
    lines += [one.sentence for one in answer_agreements]
    lines += [f"note: {note}" for note in figures.notes]
    lines += [
        f"{name} was not measured, or not to the end: {why}"
        for name, why in figures.missing.items()
    ]
    lines += [
        f"{what}: {ratio.median:.3f} (spread {ratio.spread:.0%})"
        for what, ratio in figures.ratios.items()
    ]
    return "\n".join([*lines, "", "targets", *(goal.sentence for goal in figures.goals)])


def _level_row(level: SystemResult) -> list[str]:
    figures = level.figures
    shown = [format_number(figures[name].median, 1) if name in figures else "-" for name in _TABLE]
    return [level.contender, level.part, *shown, f"{figures[WHOLE].spread:.0%}"]


def _scenario_rows(one: SystemResult) -> list[list[str]]:
    return [
        [one.part, one.contender, name, *(format_number(x, 1) for x in (s.median, s.low, s.high))]
        for name, s in one.figures.items()
    ]


ONE_TO_GENAI = f"one stream / {GENAI}'s own loop"
UNDRAFTED_TO_GENAI = f"one stream without drafts / {GENAI}'s own loop"
ONE_TO_TRANSFORMERS = f"one stream / {TRANSFORMERS}"
EIGHT_TO_ONE = "eight streams / one stream without drafts"  # in company nothing is drafted
EIGHT_TO_GENAI = f"eight streams / {GENAI}'s batch of eight"
SERVED_TO_LOOP = "eight clients over HTTP / eight streams"
LEAST: Mapping[str, float] = {
    ONE_TO_GENAI: 0.95,
    ONE_TO_TRANSFORMERS: 4.0,
    EIGHT_TO_ONE: 2.7,
    EIGHT_TO_GENAI: 1.4,
    SERVED_TO_LOOP: 0.8,
}
MOST_GAP_MS = 250.0
MOST_GROWN_MB = 8.0
FORMS = 50  # every one of them is to be valid


class RatioTable:
    """Figures by part and contender, to take ratios of."""

    def __init__(self, measured: Sequence[SystemResult]) -> None:
        self._found = {(one.part, one.contender): one.figures for one in measured}

    def figure(self, part: str, contender: str, name: str) -> RoundSummary | None:
        """None where it was not measured."""
        return self._found.get((part, contender), {}).get(name)

    def ratios(self) -> dict[str, RoundSummary]:
        """What the goals are about, round by round: drift of the machine cancels out."""
        one, eight = streams_part(1), streams_part(STREAMS)
        wanted = {
            ONE_TO_GENAI: ((one, IN_PROCESS, DECODE), (one, GENAI, DECODE)),
            ONE_TO_TRANSFORMERS: ((one, IN_PROCESS, DECODE), (one, TRANSFORMERS, DECODE)),
            EIGHT_TO_ONE: ((eight, IN_PROCESS, DECODE), (one, NO_DRAFTS, DECODE)),
            UNDRAFTED_TO_GENAI: ((one, NO_DRAFTS, DECODE), (one, GENAI, DECODE)),
            EIGHT_TO_GENAI: ((eight, IN_PROCESS, DECODE), (eight, GENAI, DECODE)),
            SERVED_TO_LOOP: ((eight, OVER_HTTP, WHOLE), (eight, IN_PROCESS, WHOLE)),
        }
        found = {what: self._ratio(*both) for what, both in wanted.items()}
        return {what: ratio for what, ratio in found.items() if ratio is not None}

    def _ratio(
        self, over: tuple[str, str, str], under: tuple[str, str, str]
    ) -> RoundSummary | None:
        a, b = self.figure(*over), self.figure(*under)
        if a is None or b is None or len(a.values) != len(b.values):
            return None
        return summarize([x / y for x, y in zip(a.values, b.values, strict=True)])


def evaluate_goals(
    board: RatioTable,
    ratios: Mapping[str, RoundSummary],
    churned: ChurnResults | None,
    filled: SchemaResults | None,
) -> tuple[Goal, ...]:
    """Ratios by their medians, waits by the worst round, answers one by one."""
    found = [
        Goal.at_least(what, ratios[what].median if what in ratios else None, least)
        for what, least in LEAST.items()
    ]
    for contender in (IN_PROCESS, OVER_HTTP):
        gap = board.figure(LongPromptScenario.name, contender, JOIN_GAP)
        what = f"ms that a stream of {contender} waits while a long prompt joins"
        found.append(Goal.at_most(what, gap.high if gap else None, MOST_GAP_MS))
    grown = churned.memory_growth_mb if churned else None
    found.append(Goal.at_most("MB that churn leaves behind", grown, MOST_GROWN_MB))
    valid = filled.valid if filled else None
    found.append(Goal.at_least(f"valid answers to {FORMS} JSON schemas", valid, FORMS))
    return tuple(found)
