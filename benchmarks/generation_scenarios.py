"""What a server of text meets besides streams of one kind, told in a few figures a round.

A scenario draws its questions once a round, and every service is asked the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.generation_answers import Answer, Ask, Heat, TextService, ask_all
from benchmarks.generation_prompts import PromptBook

STREAMS = 8
# Names of figures.
JOIN_GAP, JOIN_FIRST = "largest_gap_ms", "first_token_ms"
COLD, WARM, CACHED = "cold_first_token_ms", "warm_first_token_ms", "cached_tokens"


class Scenario(Protocol):
    """One way to use a service."""

    name: str

    def draw(self, book: PromptBook, dice: random.Random) -> Sequence[Ask]:
        """The questions of one round."""
        ...

    async def run(self, service: TextService, asks: Sequence[Ask]) -> dict[str, float]:
        """Ask them; what it gave, by name. Raises ServeError."""
        ...


@dataclass(frozen=True, slots=True)
class Join:
    """A long prompt joins streams that run: how long does any of them wait for a token?"""

    context: int  # tokens a row has room for
    joining_tokens: int = 1_500
    running_tokens: int = 16  # of the prompts of those that run
    # Enough to outlast the long prompt, which is read in parts of 16 tokens at least.
    written_tokens: int = 128
    name = "join"

    def draw(self, book: PromptBook, dice: random.Random) -> Sequence[Ask]:
        """Those that run, and the one that joins."""
        room = self.context - self.running_tokens
        running = [
            Ask(prompt, min(self.written_tokens, room))
            for prompt in book.draw_each([self.running_tokens] * (STREAMS - 1))
        ]
        return [*running, Ask(book.draw(min(self.joining_tokens, self.context - 2)), 2)]

    async def run(self, service: TextService, asks: Sequence[Ask]) -> dict[str, float]:
        """Start all but the last, which joins when each of them has a token."""
        *running, joining = [ask._replace(begun=asyncio.Event()) for ask in asks]
        under_way = asyncio.create_task(ask_all(service, running))
        begun = asyncio.gather(*(ask.begun.wait() for ask in running if ask.begun is not None))
        try:
            await asyncio.wait((under_way, begun), return_when=asyncio.FIRST_COMPLETED)
            joined = await service.answer(joining)
            gap_s = largest_gap_s(await under_way, joined)
            told = {} if gap_s is None else {JOIN_GAP: gap_s * 1e3}
            return told | {JOIN_FIRST: joined.first_s * 1e3}
        finally:
            begun.cancel()
            under_way.cancel()


def largest_gap_s(running: Sequence[Answer], joined: Answer) -> float | None:
    """The longest wait of a running stream for its next token while the other's prompt was read.

    None when one of them ended before.
    """
    begin_s, end_s = joined.asked_s, joined.arrivals_s[0]
    if min(answer.arrivals_s[-1] for answer in running) < end_s:
        return None
    found = []
    for answer in running:
        times = np.array(answer.arrivals_s)
        counts = (times[1:] > begin_s) & (times[:-1] < end_s)
        found.append(float(answer.gaps_s[counts].max(initial=0.0)))
    return max(found)


@dataclass(frozen=True, slots=True)
class Mix:
    """A closed loop of eight readers; prompts and answers of all lengths."""

    context: int
    requests: int = 16
    prompt_tokens: tuple[int, int] = (16, 512)
    new_tokens: tuple[int, int] = (8, 128)
    name = "mix"

    def draw(self, book: PromptBook, dice: random.Random) -> Sequence[Ask]:
        """Lengths are drawn evenly."""
        half = self.context // 2
        return [
            Ask(
                book.draw(min(dice.randint(*self.prompt_tokens), half)),
                min(dice.randint(*self.new_tokens), half),
            )
            for _ in range(self.requests)
        ]

    async def run(self, service: TextService, asks: Sequence[Ask]) -> dict[str, float]:
        """All of them, by eight readers."""
        return Heat(await ask_all(service, asks, readers=STREAMS)).figures


@dataclass(frozen=True, slots=True)
class Prefix:
    """Two questions behind the same long system prompt, one after the other, nobody else there."""

    context: int
    system_tokens: int = 500
    question_tokens: int = 16
    name = "prefix"

    def draw(self, book: PromptBook, dice: random.Random) -> Sequence[Ask]:
        """The first question and the second."""
        system = book.draw(min(self.system_tokens, self.context - self.question_tokens - 2))
        questions = book.draw_each([self.question_tokens] * 2)
        return [Ask(system + question, 2) for question in questions]

    async def run(self, service: TextService, asks: Sequence[Ask]) -> dict[str, float]:
        """One after the other."""
        cold, warm = await ask_all(service, asks, readers=1)
        return {
            COLD: cold.first_s * 1e3,
            WARM: warm.first_s * 1e3,
            CACHED: float(warm.cached_tokens),
        }


SCENARIOS: Mapping[str, type[Join] | type[Mix] | type[Prefix]] = {
    "join": Join,
    "mix": Mix,
    "prefix": Prefix,
}
