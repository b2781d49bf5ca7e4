"""What a server of text meets besides streams of one kind, told in a few figures a round.

A scenario draws its questions once a round, and every service is asked the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil

from benchmarks.common.local_model import LocalModel
from benchmarks.generation.streams import (
    StreamGroup,
    StreamRequest,
    StreamResult,
    TextGenerator,
    Tokens,
    run_streams,
)
from build_artifacts.decoders.gate_inputs import GATE_PASSAGES
from deployments.tokenization.encodings import open_tokenizer


class PromptSampler:
    """Draws prompts; a function of the seed and of what was drawn before.

    A prompt starts anywhere in the prose and goes on from its beginning when it is at the end.
    Two of them start at different places, so nothing that was read for one helps with another.
    """

    def __init__(self, prose: Sequence[int], seed: int) -> None:
        self._prose = list(prose)
        self._starts = self._shuffled(random.Random(seed))

    @classmethod
    def of(cls, model: LocalModel, seed: int) -> PromptSampler:
        """Prose in the tokens of a model."""
        tokenizer = open_tokenizer(model.directory)
        texts = tokenizer.encode_batch(list(GATE_PASSAGES), add_special_tokens=False)
        return cls([token for text in texts for token in text.ids], seed)

    def draw(self, tokens: int) -> Tokens:
        """The next prompt, of so many tokens."""
        start = next(self._starts)
        prose = self._prose[start:] + self._prose[:start]
        whole, rest = divmod(tokens, len(prose))
        return tuple(prose * whole + prose[:rest])

    def sample_prompts(self, lengths: Sequence[int]) -> tuple[Tokens, ...]:
        """One prompt for each length."""
        return tuple(self.draw(tokens) for tokens in lengths)

    def _shuffled(self, rng: random.Random) -> Iterator[int]:
        starts = list(range(len(self._prose)))
        while True:
            rng.shuffle(starts)
            yield from starts


PROMPTS = 24  # of different lengths, asked again and again
PROMPT_TOKENS = (4, 48)
NEW_TOKENS = (2, 16)
LEAVING = 0.5  # share of the requests
WARM_UP = 0.2  # likewise, but ahead of them: memory is looked at behind it
READERS_PER_ROW = 1.5  # so that some leave while they wait for a row
SETTLED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnResults:
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
    def memory_growth_mb(self) -> float:
        """Memory that was not given back."""
        return (self.resident_bytes_after - self.resident_bytes_before) / 1e6

    @property
    def is_clean(self) -> bool:
        """No row leaked, and nobody's answer was changed by somebody else's leaving."""
        return not (self.different or self.still_active or self.still_waiting)


class CountingService(TextGenerator, Protocol):
    """A TextGenerator that knows whom it works for."""

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are being answered, and requests that wait."""
        ...


async def churn(
    service: CountingService, book: PromptSampler, rng: random.Random, requests: int, rows: int
) -> ChurnResults:
    """StreamRequest, leave, and look at what is left. Raises ServeError."""
    prompts = book.sample_prompts([rng.randint(*PROMPT_TOKENS) for _ in range(PROMPTS)])
    alone = await run_streams(
        service, [StreamRequest(prompt, NEW_TOKENS[1]) for prompt in prompts], readers=1
    )
    right = {prompt: answer.ids for prompt, answer in zip(prompts, alone, strict=True)}
    counts = (round(requests * WARM_UP), requests)
    warm_up, asks = ([drawn(prompts, rng) for _ in range(n)] for n in counts)
    readers = max(2, int(rows * READERS_PER_ROW))
    await run_streams(service, warm_up, readers)
    before = resident_bytes()
    began_s = time.perf_counter()
    answers = await run_streams(service, asks, readers)
    seconds = time.perf_counter() - began_s
    still_active, still_waiting = await wait_until_drained(service)
    stayed = [
        (ask, answer)
        for ask, answer in zip(asks, answers, strict=True)
        if ask.disconnect_after is None
    ]
    return ChurnResults(
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


def drawn(prompts: Sequence[tuple[int, ...]], rng: random.Random) -> StreamRequest:
    """One request; who leaves does so before the first token, or after any other but the last."""
    new_tokens = rng.randint(*NEW_TOKENS)
    leaves = rng.random() < LEAVING
    return StreamRequest(
        rng.choice(prompts), new_tokens, rng.randrange(new_tokens) if leaves else None
    )


async def wait_until_drained(service: CountingService) -> tuple[int, int]:
    """What is active and waiting once the loop had time to let go."""
    end_s = time.perf_counter() + SETTLED_WITHIN_S
    while service.load != (0, 0) and time.perf_counter() < end_s:
        await asyncio.sleep(0.01)
    return service.load


def resident_bytes() -> int:
    """Memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


STREAMS = 8
# Names of figures.
JOIN_GAP, JOIN_FIRST = "largest_gap_ms", "first_token_ms"
COLD, WARM, CACHED = "cold_first_token_ms", "warm_first_token_ms", "cached_tokens"


class Scenario(Protocol):
    """One way to use a service."""

    name: str

    def draw(self, book: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """The questions of one round."""
        ...

    async def run(self, service: TextGenerator, asks: Sequence[StreamRequest]) -> dict[str, float]:
        """StreamRequest them; what it gave, by name. Raises ServeError."""
        ...


@dataclass(frozen=True, slots=True)
class LongPromptScenario:
    """A long prompt joins streams that run: how long does any of them wait for a token?"""

    context: int  # tokens a row has room for
    joining_tokens: int = 1_500
    running_tokens: int = 16  # of the prompts of those that run
    # Enough to outlast the long prompt, which is read in parts of 16 tokens at least.
    written_tokens: int = 128
    name = "join"

    def draw(self, book: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """Those that run, and the one that joins."""
        room = self.context - self.running_tokens
        running = [
            StreamRequest(prompt, min(self.written_tokens, room))
            for prompt in book.sample_prompts([self.running_tokens] * (STREAMS - 1))
        ]
        return [*running, StreamRequest(book.draw(min(self.joining_tokens, self.context - 2)), 2)]

    async def run(self, service: TextGenerator, asks: Sequence[StreamRequest]) -> dict[str, float]:
        """Start all but the last, which joins when each of them has a token."""
        *running, joining = [ask._replace(begun=asyncio.Event()) for ask in asks]
        under_way = asyncio.create_task(run_streams(service, running))
        begun = asyncio.gather(*(ask.begun.wait() for ask in running if ask.begun is not None))
        try:
            await asyncio.wait((under_way, begun), return_when=asyncio.FIRST_COMPLETED)
            joined = await service.answer(joining)
            gap_s = largest_gap_s(await under_way, joined)
            told = {} if gap_s is None else {JOIN_GAP: gap_s * 1e3}
            return told | {JOIN_FIRST: joined.ttft_s * 1e3}
        finally:
            begun.cancel()
            under_way.cancel()


def largest_gap_s(running: Sequence[StreamResult], joined: StreamResult) -> float | None:
    """The longest wait of a running stream for its next token while the other's prompt was read.

    None when one of them ended before.
    """
    begin_s, end_s = joined.submitted_s, joined.arrivals_s[0]
    if min(answer.arrivals_s[-1] for answer in running) < end_s:
        return None
    found = []
    for answer in running:
        times = np.array(answer.arrivals_s)
        counts = (times[1:] > begin_s) & (times[:-1] < end_s)
        found.append(float(answer.inter_token_s[counts].max(initial=0.0)))
    return max(found)


@dataclass(frozen=True, slots=True)
class MixedLoadScenario:
    """A closed loop of eight readers; prompts and answers of all lengths."""

    context: int
    requests: int = 16
    prompt_tokens: tuple[int, int] = (16, 512)
    new_tokens: tuple[int, int] = (8, 128)
    name = "mix"

    def draw(self, book: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """Lengths are drawn evenly."""
        half = self.context // 2
        return [
            StreamRequest(
                book.draw(min(rng.randint(*self.prompt_tokens), half)),
                min(rng.randint(*self.new_tokens), half),
            )
            for _ in range(self.requests)
        ]

    async def run(self, service: TextGenerator, asks: Sequence[StreamRequest]) -> dict[str, float]:
        """All of them, by eight readers."""
        return StreamGroup(await run_streams(service, asks, readers=STREAMS)).figures


@dataclass(frozen=True, slots=True)
class SharedPrefixScenario:
    """Two questions behind the same long system prompt, one after the other, nobody else there."""

    context: int
    system_tokens: int = 500
    question_tokens: int = 16
    name = "prefix"

    def draw(self, book: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """The first question and the second."""
        system = book.draw(min(self.system_tokens, self.context - self.question_tokens - 2))
        questions = book.sample_prompts([self.question_tokens] * 2)
        return [StreamRequest(system + question, 2) for question in questions]

    async def run(self, service: TextGenerator, asks: Sequence[StreamRequest]) -> dict[str, float]:
        """One after the other."""
        cold, warm = await run_streams(service, asks, readers=1)
        return {
            COLD: cold.ttft_s * 1e3,
            WARM: warm.ttft_s * 1e3,
            CACHED: float(warm.cached_tokens),
        }


SCENARIOS: Mapping[
    str, type[LongPromptScenario] | type[MixedLoadScenario] | type[SharedPrefixScenario]
] = {
    "join": LongPromptScenario,
    "mix": MixedLoadScenario,
    "prefix": SharedPrefixScenario,
}
