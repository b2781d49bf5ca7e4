"""Scenarios: load patterns in addition to the fixed numbers of equal streams.

A scenario samples its requests once per round. Every streaming system gets the same requests. Each
run of a scenario yields a few metrics.
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
    run_streams,
)
from build_artifacts.decoders.gate_inputs import GATE_PASSAGES
from build_artifacts.types import Tokens
from deployments.tokenization.encodings import open_tokenizer


class PromptSampler:
    """Sampler of prompts. Equal seeds give equal sequences.

    A prompt is a slice of tokenized prose that repeats endlessly. Prompts start at different
    offsets, so that no prompt benefits from the prefix cache entry of another prompt.
    """

    def __init__(self, prose: Sequence[int], seed: int) -> None:
        self._prose = list(prose)
        self._offsets = self._shuffle_offsets(random.Random(seed))

    @classmethod
    def open(cls, model: LocalModel, seed: int) -> PromptSampler:
        """Build a sampler on the passages of the accuracy gate, tokenized for `model`."""
        tokenizer = open_tokenizer(model.directory)
        texts = tokenizer.encode_batch(list(GATE_PASSAGES), add_special_tokens=False)
        return cls([token for text in texts for token in text.ids], seed)

    def sample(self, tokens: int) -> Tokens:
        """Return the next prompt, with exactly `tokens` tokens."""
        start = next(self._offsets)
        prose = self._prose[start:] + self._prose[:start]
        repeats, remainder = divmod(tokens, len(prose))
        return tuple(prose * repeats + prose[:remainder])

    def sample_prompts(self, lengths: Sequence[int]) -> tuple[Tokens, ...]:
        """Return one prompt for each of `lengths`, which are in tokens."""
        return tuple(self.sample(tokens) for tokens in lengths)

    def _shuffle_offsets(self, rng: random.Random) -> Iterator[int]:
        offsets = list(range(len(self._prose)))
        while True:
            rng.shuffle(offsets)
            yield from offsets


PROMPTS = 24  # number of distinct prompts
PROMPT_TOKENS = (4, 48)
NEW_TOKENS = (2, 16)
DISCONNECT_SHARE = 0.5  # share of the requests that disconnect early
WARM_UP_SHARE = 0.2  # warm-up requests / measured requests
CLIENTS_PER_SLOT = 1.5  # above 1, so that some requests are queued when their client disconnects
DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnResults:
    """Counts of requests, and the state of the generator after all requests have ended."""

    requests: int
    disconnected: int
    compared: int  # number of answers to requests without a disconnect
    different: int  # number of compared answers that differ from the unbatched answer
    still_active: int  # number of KV slots still in use
    still_waiting: int
    resident_bytes_before: int  # resident memory after the warm-up
    resident_bytes_after: int
    seconds: float

    @property
    def memory_growth_mb(self) -> float:
        return (self.resident_bytes_after - self.resident_bytes_before) / 1e6

    @property
    def is_clean(self) -> bool:
        """Whether no KV slot is in use, no request waits, and no compared answer differs."""
        return not (self.different or self.still_active or self.still_waiting)


class SlotReportingGenerator(TextGenerator, Protocol):
    """TextGenerator whose load `wait_until_drained` can read."""

    @property
    def slot_use(self) -> tuple[int, int]:
        """Number of running requests, and number of waiting requests."""
        ...


async def churn(
    generator: SlotReportingGenerator,
    sampler: PromptSampler,
    rng: random.Random,
    request_count: int,
    kv_slots: int,
) -> ChurnResults:
    """Send requests, about half of which disconnect early. Check the answers to all others.

    An answer must equal the unbatched answer to the same prompt. Afterwards, count the KV slots
    that are still in use, and read the memory. Raises ServeError if a request fails.
    """
    prompts = sampler.sample_prompts([rng.randint(*PROMPT_TOKENS) for _ in range(PROMPTS)])
    unbatched = await run_streams(
        generator, [StreamRequest(prompt, NEW_TOKENS[1]) for prompt in prompts], clients=1
    )
    expected = {prompt: answer.ids for prompt, answer in zip(prompts, unbatched, strict=True)}
    counts = (round(request_count * WARM_UP_SHARE), request_count)
    warm_up, requests = ([random_request(prompts, rng) for _ in range(n)] for n in counts)
    clients = max(2, int(kv_slots * CLIENTS_PER_SLOT))
    await run_streams(generator, warm_up, clients)
    before = resident_bytes()
    started_s = time.perf_counter()
    answers = await run_streams(generator, requests, clients)
    seconds = time.perf_counter() - started_s
    still_active, still_waiting = await wait_until_drained(generator)
    completed = [
        (request, answer)
        for request, answer in zip(requests, answers, strict=True)
        if request.disconnect_after is None
    ]
    return ChurnResults(
        requests=len(answers),
        disconnected=len(answers) - len(completed),
        compared=len(completed),
        different=sum(
            answer.ids != expected[request.prompt][: request.new_tokens]
            for request, answer in completed
        ),
        still_active=still_active,
        still_waiting=still_waiting,
        resident_bytes_before=before,
        resident_bytes_after=resident_bytes(),
        seconds=seconds,
    )


def random_request(prompts: Sequence[tuple[int, ...]], rng: random.Random) -> StreamRequest:
    """Return a random request. A disconnect, if any, happens before the last token."""
    new_tokens = rng.randint(*NEW_TOKENS)
    disconnects = rng.random() < DISCONNECT_SHARE
    return StreamRequest(
        rng.choice(prompts), new_tokens, rng.randrange(new_tokens) if disconnects else None
    )


async def wait_until_drained(generator: SlotReportingGenerator) -> tuple[int, int]:
    """Wait up to DRAIN_TIMEOUT_S until the generator is idle. Return its load."""
    deadline_s = time.perf_counter() + DRAIN_TIMEOUT_S
    while generator.slot_use != (0, 0) and time.perf_counter() < deadline_s:
        await asyncio.sleep(0.01)
    return generator.slot_use


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


STREAMS = 8
# Names of metrics.
RUNNING_INTER_TOKEN_MAX, JOINING_TTFT = "running_inter_token_ms_max", "joining_ttft_ms"
COLD_TTFT, WARM_TTFT, CACHED_TOKENS = "cold_ttft_ms", "warm_ttft_ms", "cached_tokens"


class Scenario(Protocol):
    """A load pattern that yields metrics."""

    name: str

    def sample(self, prompts: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """Sample the requests of one round."""
        ...

    async def run(
        self, generator: TextGenerator, requests: Sequence[StreamRequest]
    ) -> dict[str, float]:
        """Send the requests. Return the metrics by name. Raises ServeError if a request fails."""
        ...


@dataclass(frozen=True, slots=True)
class LongPromptScenario:
    """A long prompt that joins running streams.

    Measures the longest inter-token latency of the running streams while the long prompt prefills.
    """

    context: int  # tokens of a KV slot
    joining_tokens: int = 1_500
    running_tokens: int = 16  # prompt tokens of each running stream
    # New tokens of each running stream. Each stream gets one token per prefill chunk of the long
    # prompt. A chunk has at least 16 tokens, so the prefill has at most 94 chunks, and the streams
    # outlast the prefill.
    written_tokens: int = 128
    name = "long-prompt"

    def sample(self, prompts: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """Return the requests of the running streams, followed by the long request."""
        capacity = self.context - self.running_tokens
        running = [
            StreamRequest(prompt, min(self.written_tokens, capacity))
            for prompt in prompts.sample_prompts([self.running_tokens] * (STREAMS - 1))
        ]
        return [
            *running,
            StreamRequest(prompts.sample(min(self.joining_tokens, self.context - 2)), 2),
        ]

    async def run(
        self, generator: TextGenerator, requests: Sequence[StreamRequest]
    ) -> dict[str, float]:
        """Start all requests but the last. Send the last when every running stream has a token."""
        *running, joining = [request._replace(first_token=asyncio.Event()) for request in requests]
        running_task = asyncio.create_task(run_streams(generator, running))
        first_token = asyncio.gather(
            *(request.first_token.wait() for request in running if request.first_token is not None)
        )
        try:
            await asyncio.wait((running_task, first_token), return_when=asyncio.FIRST_COMPLETED)
            joined = await generator.generate(joining)
            gap_s = max_inter_token_s(await running_task, joined)
            metrics = {} if gap_s is None else {RUNNING_INTER_TOKEN_MAX: gap_s * 1e3}
            return metrics | {JOINING_TTFT: joined.ttft_s * 1e3}
        finally:
            first_token.cancel()
            running_task.cancel()


def max_inter_token_s(running: Sequence[StreamResult], joined: StreamResult) -> float | None:
    """Return the longest inter-token latency of `running` during the prefill of `joined`.

    Return None if a running stream ended before the end of this prefill.
    """
    begin_s, end_s = joined.submitted_s, joined.arrivals_s[0]
    if min(answer.arrivals_s[-1] for answer in running) < end_s:
        return None
    longest = []
    for answer in running:
        times = np.array(answer.arrivals_s)
        overlaps = (times[1:] > begin_s) & (times[:-1] < end_s)
        longest.append(float(answer.inter_token_s[overlaps].max(initial=0.0)))
    return max(longest)


@dataclass(frozen=True, slots=True)
class MixedLoadScenario:
    """Closed loop of eight clients with prompts and answers of random lengths."""

    context: int
    requests: int = 16
    prompt_tokens: tuple[int, int] = (16, 512)
    new_tokens: tuple[int, int] = (8, 128)
    name = "mixed-load"

    def sample(self, prompts: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        """Sample lengths in tokens from uniform distributions, limited to half of the context."""
        half = self.context // 2
        return [
            StreamRequest(
                prompts.sample(min(rng.randint(*self.prompt_tokens), half)),
                min(rng.randint(*self.new_tokens), half),
            )
            for _ in range(self.requests)
        ]

    async def run(
        self, generator: TextGenerator, requests: Sequence[StreamRequest]
    ) -> dict[str, float]:
        return StreamGroup(await run_streams(generator, requests, clients=STREAMS)).metrics


@dataclass(frozen=True, slots=True)
class SharedPrefixScenario:
    """Two sequential requests with the same long system prompt on an idle generator."""

    context: int
    system_tokens: int = 500
    question_tokens: int = 16
    name = "shared-prefix"

    def sample(self, prompts: PromptSampler, rng: random.Random) -> Sequence[StreamRequest]:
        system = prompts.sample(min(self.system_tokens, self.context - self.question_tokens - 2))
        questions = prompts.sample_prompts([self.question_tokens] * 2)
        return [StreamRequest(system + question, 2) for question in questions]

    async def run(
        self, generator: TextGenerator, requests: Sequence[StreamRequest]
    ) -> dict[str, float]:
        cold, warm = await run_streams(generator, requests, clients=1)
        return {
            COLD_TTFT: cold.ttft_s * 1e3,
            WARM_TTFT: warm.ttft_s * 1e3,
            CACHED_TOKENS: float(warm.cached_tokens),
        }


SCENARIOS: Mapping[
    str, type[LongPromptScenario] | type[MixedLoadScenario] | type[SharedPrefixScenario]
] = {
    "long-prompt": LongPromptScenario,
    "mixed-load": MixedLoadScenario,
    "shared-prefix": SharedPrefixScenario,
}
