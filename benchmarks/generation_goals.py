"""What text generation is to reach, as ratios within one run and as waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.generation_answers import DECODE, WHOLE
from benchmarks.generation_churn import ChurnFigures
from benchmarks.generation_contenders import GENAI, OURS, SERVED, TRANSFORMERS, UNDRAFTED
from benchmarks.generation_figures import Measured, streams_part
from benchmarks.generation_filling import SchemaFigures
from benchmarks.generation_scenarios import JOIN_GAP, STREAMS, Join
from benchmarks.goals import Goal
from benchmarks.measures import Summary, summarise

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


class Board:
    """Figures by part and contender, to take ratios of."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._found = {(one.part, one.contender): one.figures for one in measured}

    def figure(self, part: str, contender: str, name: str) -> Summary | None:
        """None where it was not measured."""
        return self._found.get((part, contender), {}).get(name)

    def ratios(self) -> dict[str, Summary]:
        """What the goals are about, round by round: drift of the machine cancels out."""
        one, eight = streams_part(1), streams_part(STREAMS)
        wanted = {
            ONE_TO_GENAI: ((one, OURS, DECODE), (one, GENAI, DECODE)),
            ONE_TO_TRANSFORMERS: ((one, OURS, DECODE), (one, TRANSFORMERS, DECODE)),
            EIGHT_TO_ONE: ((eight, OURS, DECODE), (one, UNDRAFTED, DECODE)),
            UNDRAFTED_TO_GENAI: ((one, UNDRAFTED, DECODE), (one, GENAI, DECODE)),
            EIGHT_TO_GENAI: ((eight, OURS, DECODE), (eight, GENAI, DECODE)),
            SERVED_TO_LOOP: ((eight, SERVED, WHOLE), (eight, OURS, WHOLE)),
        }
        found = {what: self._ratio(*both) for what, both in wanted.items()}
        return {what: ratio for what, ratio in found.items() if ratio is not None}

    def _ratio(self, over: tuple[str, str, str], under: tuple[str, str, str]) -> Summary | None:
        a, b = self.figure(*over), self.figure(*under)
        if a is None or b is None or len(a.values) != len(b.values):
            return None
        return summarise([x / y for x, y in zip(a.values, b.values, strict=True)])


def goals_of(
    board: Board,
    ratios: Mapping[str, Summary],
    churned: ChurnFigures | None,
    filled: SchemaFigures | None,
) -> tuple[Goal, ...]:
    """Ratios by their medians, waits by the worst round, answers one by one."""
    found = [
        Goal.at_least(what, ratios[what].median if what in ratios else None, least)
        for what, least in LEAST.items()
    ]
    for contender in (OURS, SERVED):
        gap = board.figure(Join.name, contender, JOIN_GAP)
        what = f"ms that a stream of {contender} waits while a long prompt joins"
        found.append(Goal.at_most(what, gap.high if gap else None, MOST_GAP_MS))
    grown = churned.grown_mb if churned else None
    found.append(Goal.at_most("MB that churn leaves behind", grown, MOST_GROWN_MB))
    valid = filled.valid if filled else None
    found.append(Goal.at_least(f"valid answers to {FORMS} JSON schemas", valid, FORMS))
    return tuple(found)
