"""Steady load of requests whose right answers are known: an open loop, one connection each.

The next request is sent at its time, whether or not others are answered, as independent clients do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, model_path
from benchmarks.hostile.wire import HttpExchange, build_post, send_raw

RIGHT = "right"
WRONG = "wrong"
TIMEOUT_S = 60.0  # s after which a client gives up
MIN_COSINE = 0.999  # of an embedding computed in another batch
ANSWER_TOKENS = 8
SENTENCES = tuple(f"A sentence of middling length, number {number}." for number in range(16))
PROMPTS = ("The sea is", "The capital of France is", "Once upon a time", "Two and two make")


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request and the check of the parsed body of its answer."""

    kind: str
    raw: bytes
    is_right: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Observation:
    """One request. `outcome` is RIGHT, WRONG or the status; 0 and -1 as in HttpExchange."""

    kind: str
    outcome: str
    started_s: float  # time.perf_counter
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


async def build_requests(
    address: ServerAddress, embedder: str, writer: str
) -> tuple[list[KnownRequest], list[KnownRequest]]:
    """Ask for the right answers; return requests of encoders and of generators."""
    encoders, generators = [], []
    for sentence in SENTENCES:
        raw = build_post(address.prefix + model_path(embedder), build_inference_body(sentence))
        vector = (await _ask(address, raw))[0]
        encoders.append(KnownRequest("encoder", raw, _near(vector)))
    for prompt in PROMPTS:
        body = {"model": writer, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        raw = build_post(address.prefix + "/v1/completions", orjson.dumps(body))
        text = (await _ask(address, raw))["choices"][0]["text"]
        generators.append(KnownRequest("generator", raw, _equal(text)))
    return encoders, generators


def _near(vector: Sequence[float]) -> Callable[[Any], bool]:
    return lambda body: sum(a * b for a, b in zip(body[0], vector, strict=True)) >= MIN_COSINE


def _equal(text: str) -> Callable[[Any], bool]:
    return lambda body: bool(body["choices"][0]["text"] == text)


async def _ask(address: ServerAddress, raw: bytes) -> Any:
    answer = await send_raw(address, raw, TIMEOUT_S)
    if answer.status != 200:
        raise BenchmarkError(
            f"a request of the load returned {answer.status}: {answer.body[:200]!r}",
            hint="name served models with --model and --writer",
        )
    return orjson.loads(answer.body)


class SteadyLoad:
    """Sends requests at fixed rates until `stop`."""

    def __init__(self, address: ServerAddress) -> None:
        self.observations: list[Observation] = []
        self._address = address
        self._senders: list[asyncio.Task[None]] = []
        self._requests: set[asyncio.Task[None]] = set()

    def start(self, requests: Iterable[KnownRequest], rate: float) -> None:
        """Send `requests` in turn, `rate` of them per second."""
        self._senders.append(asyncio.create_task(self._send_all(requests, 1 / rate)))

    async def stop(self) -> None:
        """Send no more; wait for the answers."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await asyncio.gather(*self._requests)

    async def _send_all(self, requests: Iterable[KnownRequest], interval_s: float) -> None:
        next_s = time.perf_counter()
        for request in cycle(requests):
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            task = asyncio.create_task(self._send(request))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            next_s += interval_s

    async def _send(self, request: KnownRequest) -> None:
        started_s = time.perf_counter()
        answer = await send_raw(self._address, request.raw, TIMEOUT_S)
        outcome = judge(request, answer)
        self.observations.append(Observation(request.kind, outcome, started_s, time.perf_counter()))


def judge(request: KnownRequest, answer: HttpExchange) -> str:
    """Return RIGHT or WRONG for a complete answer with status 200, else the status."""
    if answer.status != 200:
        return str(answer.status)
    try:
        return RIGHT if request.is_right(orjson.loads(answer.body)) else WRONG
    except (ValueError, KeyError, IndexError, TypeError):
        return WRONG
