"""A thousand requests, half of whose readers leave at some moment: is all of it given back?"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from benchmarks.generation_answers import Ask, TextService, ask_all
from benchmarks.generation_prompts import PromptBook

PROMPTS = 24  # of different lengths, asked again and again
PROMPT_TOKENS = (4, 48)
NEW_TOKENS = (2, 16)
LEAVING = 0.5  # share of the requests
WARM_UP = 0.2  # likewise, but ahead of them: memory is looked at behind it
READERS_PER_ROW = 1.5  # so that some leave while they wait for a row
SETTLED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnFigures:
    """What was left when all had ended."""

    requests: int
    left: int  # whose readers went away
    compared: int  # the others
    different: int  # of those, not answered as the same prompt is alone
    still_active: int  # rows that were not given back
    still_waiting: int
    resident_bytes_before: int  # after the warm-up
    resident_bytes_after: int
    seconds: float

    @property
    def grown_mb(self) -> float:
        """Memory that was not given back."""
        return (self.resident_bytes_after - self.resident_bytes_before) / 1e6

    @property
    def is_clean(self) -> bool:
        """No row leaked, and nobody's answer was changed by somebody else's leaving."""
        return not (self.different or self.still_active or self.still_waiting)


class CountingService(TextService, Protocol):
    """A TextService that knows whom it works for."""

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are being answered, and requests that wait."""
        ...


async def churn(
    service: CountingService, book: PromptBook, dice: random.Random, requests: int, rows: int
) -> ChurnFigures:
    """Ask, leave, and look at what is left. Raises ServeError."""
    prompts = book.draw_each([dice.randint(*PROMPT_TOKENS) for _ in range(PROMPTS)])
    alone = await ask_all(service, [Ask(prompt, NEW_TOKENS[1]) for prompt in prompts], readers=1)
    right = {prompt: answer.ids for prompt, answer in zip(prompts, alone, strict=True)}
    counts = (round(requests * WARM_UP), requests)
    warm_up, asks = ([drawn(prompts, dice) for _ in range(n)] for n in counts)
    readers = max(2, int(rows * READERS_PER_ROW))
    await ask_all(service, warm_up, readers)
    before = resident_bytes()
    began_s = time.perf_counter()
    answers = await ask_all(service, asks, readers)
    seconds = time.perf_counter() - began_s
    still_active, still_waiting = await settled(service)
    stayed = [
        (ask, answer) for ask, answer in zip(asks, answers, strict=True) if ask.leaves_after is None
    ]
    return ChurnFigures(
        requests=len(answers),
        left=len(answers) - len(stayed),
        compared=len(stayed),
        different=sum(answer.ids != right[ask.prompt][: ask.new_tokens] for ask, answer in stayed),
        still_active=still_active,
        still_waiting=still_waiting,
        resident_bytes_before=before,
        resident_bytes_after=resident_bytes(),
        seconds=seconds,
    )


def drawn(prompts: Sequence[tuple[int, ...]], dice: random.Random) -> Ask:
    """One request; who leaves does so before the first token, or after any other but the last."""
    new_tokens = dice.randint(*NEW_TOKENS)
    leaves = dice.random() < LEAVING
    return Ask(dice.choice(prompts), new_tokens, dice.randrange(new_tokens) if leaves else None)


async def settled(service: CountingService) -> tuple[int, int]:
    """What is active and waiting once the loop had time to let go."""
    end_s = time.perf_counter() + SETTLED_WITHIN_S
    while service.load != (0, 0) and time.perf_counter() < end_s:
        await asyncio.sleep(0.01)
    return service.load


def resident_bytes() -> int:
    """Memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)
