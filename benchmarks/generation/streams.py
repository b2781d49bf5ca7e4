"""One stream of text as its reader saw it, and what several of them say together.

Whoever generates, in this process or behind HTTP, is asked the same way and answers with the times
at which tokens came; every figure is computed from those, after the clock has stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

IN_PROCESS = "hundredfold"
OVER_HTTP = "hundredfold over HTTP"
NO_DRAFTS = "hundredfold, no drafts"
GENAI = "onnxruntime-genai"
TRANSFORMERS = "transformers bf16"
PAGED = "transformers bf16, paged"
LLAMA = "llama.cpp"


class System(Protocol):
    """Something that writes text."""

    @property
    def name(self) -> str:
        """As in the result."""
        ...

    @property
    def max_streams(self) -> int | None:
        """At once; None: any number."""
        ...

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """An answer of so many tokens to each prompt, greedy. Raises ServeError."""
        ...


@dataclass(frozen=True, slots=True)
class StreamingSystem:
    """A System over a TextGenerator: as many readers as prompts, all from the same moment on."""

    name: str
    service: TextGenerator
    runner: asyncio.Runner
    max_streams: int | None = field(default=None, init=False)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """All streams together. Raises ServeError."""
        asks = [StreamRequest(prompt, new_tokens) for prompt in prompts]
        return StreamGroup(self.runner.run(run_streams(self.service, asks)))


# Names of figures. Tokens per second:
DECODE = "decode_tokens_per_s"  # while all streams write
WHOLE = "tokens_per_s"  # from the first question to the last token
# Milliseconds until a stream's first token: the median stream's, and the last one's.
TTFT, TTFT_MAX = "first_token_ms_p50", "first_token_ms_max"
# Milliseconds between two tokens of a stream.
INTER_TOKEN, INTER_TOKEN_P99, INTER_TOKEN_MAX = "gap_ms_p50", "gap_ms_p99", "gap_ms_max"

Tokens = tuple[int, ...]


class StreamRequest(NamedTuple):
    """What a stream is asked for: greedy, and with as many tokens as said, whatever they are."""

    prompt: Tokens
    new_tokens: int
    disconnect_after: int | None = None  # tokens, after which the reader goes away
    begun: asyncio.Event | None = None  # to be set when the first token comes


class StreamResult(NamedTuple):
    """What came of it. Times are time.perf_counter."""

    submitted_s: float
    arrivals_s: tuple[float, ...]  # of each token; over HTTP of each event with text
    tokens: int
    ids: Tokens = ()  # empty where only the text is told
    text: str = ""
    cached_tokens: int = 0  # of the prompt, computed for an earlier request

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.submitted_s

    @property
    def inter_token_s(self) -> NDArray[np.float64]:
        """Between each two that follow each other."""
        return np.diff(self.arrivals_s)


class TextGenerator(Protocol):
    """Many streams at once, on the event loop that runs."""

    async def answer(self, ask: StreamRequest) -> StreamResult:
        """One stream to its end. Raises ServeError."""
        ...


async def run_streams(
    service: TextGenerator, asks: Sequence[StreamRequest], readers: int | None = None
) -> tuple[StreamResult, ...]:
    """All answers, in order: by so many readers, each with one stream at a time, or all at once.

    Raises the first failure, and ends the rest.
    """
    answers: dict[int, StreamResult] = {}
    waiting = iter(enumerate(asks))

    async def read() -> None:
        for number, ask in waiting:
            answers[number] = await service.answer(ask)

    tasks = [asyncio.create_task(read()) for _ in range(readers or len(asks))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tuple(answers[number] for number in range(len(asks)))


@dataclass(frozen=True, slots=True)
class StreamGroup:
    """Some streams that were asked for together, or one after the other by a few readers."""

    answers: tuple[StreamResult, ...]

    @property
    def figures(self) -> dict[str, float]:
        """All but DECODE, by the names of the constants above."""
        return {WHOLE: self.tokens_per_s, **self._first_ms(), **self._gap_ms()}

    @property
    def tokens_per_s(self) -> float:
        """Of all streams, from the first question to the last token: prompts take their time."""
        end_s = max(answer.arrivals_s[-1] for answer in self.answers)
        began_s = min(answer.submitted_s for answer in self.answers)
        return sum(answer.tokens for answer in self.answers) / (end_s - began_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """While all of them were writing: no prompt is read any more, nobody is done yet.

        None where there was no such time, or where arrivals are those of events.
        """
        begin_s = max(answer.arrivals_s[0] for answer in self.answers)
        end_s = min(answer.arrivals_s[-1] for answer in self.answers)
        if end_s <= begin_s or not all(answer.ids for answer in self.answers):
            return None
        times = np.concatenate([answer.arrivals_s for answer in self.answers])
        return float(((times > begin_s) & (times <= end_s)).sum() / (end_s - begin_s))

    def _first_ms(self) -> dict[str, float]:
        firsts = [answer.ttft_s * 1e3 for answer in self.answers]
        return {TTFT: float(np.median(firsts)), TTFT_MAX: max(firsts)}

    def _gap_ms(self) -> dict[str, float]:
        gaps = np.concatenate([answer.inter_token_s for answer in self.answers]) * 1e3
        if not gaps.size:
            return {}
        p50, p99 = np.percentile(gaps, (50, 99))
        return {
            INTER_TOKEN: float(p50),
            INTER_TOKEN_P99: float(p99),
            INTER_TOKEN_MAX: float(gaps.max()),
        }
