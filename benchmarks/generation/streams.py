"""Generation streams: requests, arrival times of tokens, and metrics over several streams.

Every system returns arrival times in the same form. All metrics are computed from arrival times,
after the timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.closed_loop import run_clients
from build_artifacts.types import Tokens

IN_PROCESS = "hundredfold"
OVER_HTTP = "hundredfold over HTTP"
NO_DRAFTS = "hundredfold, no drafts"
GENAI = "onnxruntime-genai"
TRANSFORMERS = "transformers bf16"
PAGED_TRANSFORMERS = "transformers bf16, paged"
LLAMA_CPP = "llama.cpp"


class System(Protocol):
    """A measured system that generates text: this project or a baseline."""

    @property
    def name(self) -> str: ...

    @property
    def max_streams(self) -> int | None:
        """Maximum number of concurrent streams; None: unlimited."""
        ...

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """Decode `new_tokens` greedily for each prompt. Raises ServeError if it fails."""
        ...


@dataclass(frozen=True, slots=True)
class StreamingSystem:
    """Measured system that sends all prompts to a TextGenerator at the same time.

    `scopes` yields the scope of the prefix cache of each run. With a new scope, prompts of earlier
    runs are prefilled again.
    """

    name: str
    generator: TextGenerator
    runner: asyncio.Runner
    scopes: Iterator[str] = field(default_factory=lambda: repeat(""))
    max_streams: int | None = field(default=None, init=False)

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        """Run all streams concurrently. Raises ServeError if a stream fails."""
        scope = next(self.scopes)
        requests = [StreamRequest(p, new_tokens, prefix_cache_scope=scope) for p in prompts]
        return StreamGroup(self.runner.run(run_streams(self.generator, requests)))


# Metrics in tokens per second.
DECODE = "decode_tokens_per_s"  # rate while all streams decode
THROUGHPUT = "tokens_per_s"  # rate from the first request to the last token
# Time to first token in ms: median and maximum of the streams.
TTFT, TTFT_MAX = "ttft_ms_p50", "ttft_ms_max"
# Time between two tokens of a stream in ms.
INTER_TOKEN, INTER_TOKEN_P99, INTER_TOKEN_MAX = (
    "inter_token_ms_p50",
    "inter_token_ms_p99",
    "inter_token_ms_max",
)


class StreamRequest(NamedTuple):
    """Request for `new_tokens` greedily decoded tokens; for fewer only if it `may_end_early`."""

    prompt: Tokens
    new_tokens: int
    disconnect_after: int | None = None  # tokens before the disconnect; must be None over HTTP
    first_token: asyncio.Event | None = None  # set when the first token arrives
    prefix_cache_scope: str = ""  # only prompts of one scope share cached prefixes; "" over HTTP
    may_end_early: bool = False  # whether an end token ends the answer; False over HTTP


class StreamResult(NamedTuple):
    """Tokens of a stream and their arrival times (time.perf_counter)."""

    submitted_s: float
    arrivals_s: tuple[float, ...]  # one time per token; over HTTP one per chunk of text
    tokens: int
    ids: Tokens = ()  # empty if the system returns text only
    text: str = ""
    cached_tokens: int = 0  # number of prompt tokens from the prefix cache

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.submitted_s

    @property
    def inter_token_s(self) -> NDArray[np.float64]:
        """Times between adjacent tokens."""
        return np.diff(self.arrivals_s)


class TextGenerator(Protocol):
    """Text generator that serves concurrent streams on the running event loop."""

    async def generate(self, request: StreamRequest) -> StreamResult:
        """Run one stream to its end or to the disconnect. Raises ServeError if it fails."""
        ...


async def run_streams(
    generator: TextGenerator, requests: Sequence[StreamRequest], clients: int | None = None
) -> tuple[StreamResult, ...]:
    """Run `requests` and return their answers in order.

    Each of `clients` clients runs one stream at a time; None runs all streams at once. If a stream
    fails, the other streams are cancelled and the error is raised.
    """
    answers: dict[int, StreamResult] = {}

    async def run_stream(number: int) -> None:
        answers[number] = await generator.generate(requests[number])

    await run_clients(clients or len(requests), range(len(requests)), run_stream)
    return tuple(answers[number] for number in range(len(requests)))


@dataclass(frozen=True, slots=True)
class StreamGroup:
    """Answers of streams that ran concurrently, or in turn on a few clients."""

    answers: tuple[StreamResult, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics except DECODE, which not every system can measure."""
        return {THROUGHPUT: self.tokens_per_s, **self._ttft_ms(), **self._inter_token_ms()}

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all streams, from the first request to the last token."""
        end_s = max(answer.arrivals_s[-1] for answer in self.answers)
        started_s = min(answer.submitted_s for answer in self.answers)
        return sum(answer.tokens for answer in self.answers) / (end_s - started_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second while all streams decode.

        The interval begins when the last stream gets its first token. It ends when the first stream
        ends. None if the interval is empty, or if an answer lacks token ids. Answers over HTTP lack
        token ids, and one of their arrival times may stand for several tokens.
        """
        begin_s = max(answer.arrivals_s[0] for answer in self.answers)
        end_s = min(answer.arrivals_s[-1] for answer in self.answers)
        if end_s <= begin_s or not all(answer.ids for answer in self.answers):
            return None
        times = np.concatenate([answer.arrivals_s for answer in self.answers])
        return float(((times > begin_s) & (times <= end_s)).sum() / (end_s - begin_s))

    def _ttft_ms(self) -> dict[str, float]:
        ttfts = [answer.ttft_s * 1e3 for answer in self.answers]
        return {TTFT: float(np.median(ttfts)), TTFT_MAX: max(ttfts)}

    def _inter_token_ms(self) -> dict[str, float]:
        gaps = np.concatenate([answer.inter_token_s for answer in self.answers]) * 1e3
        if not gaps.size:
            return {}
        p50, p99 = np.percentile(gaps, (50, 99))
        return {
            INTER_TOKEN: float(p50),
            INTER_TOKEN_P99: float(p99),
            INTER_TOKEN_MAX: float(gaps.max()),
        }
