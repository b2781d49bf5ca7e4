"""Steady load of requests with known right answers: an open loop, one connection per request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from benchmarks.common.agreement import is_same_completion, is_same_embedding
from benchmarks.common.fixed_rate import FixedRateSender
from benchmarks.common.http import ServerAddress, build_inference_body, model_path
from benchmarks.common.wire import HttpExchange, build_closing_post, require_ok, send_raw

RIGHT = "right"
WRONG = "wrong"
CUT = "cut"
TIMEOUT_S = 60.0  # timeout of each request in s
MIN_COSINE = 0.999  # minimum cosine between embeddings of one text from different batches
ANSWER_TOKENS = 8
SENTENCES = tuple(f"A sentence of middling length, number {number}." for number in range(16))
COMPLETIONS_PATH = "/v1/completions"
PROMPTS = ("The sea is", "The capital of France is", "Once upon a time", "Two and two make")


class StreamCut(Exception):
    """A stream contained an error or stopped before its end marker."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request, and the check that its parsed answer is right."""

    kind: str
    raw: bytes
    is_right: Callable[[Any], bool]
    parse: Callable[[bytes], Any] = orjson.loads  # may raise StreamCut


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of one request. `outcome` is RIGHT, WRONG, CUT, or an HTTP status as text.

    CUT: the connection ended in the middle of a response with status 200.
    A request without a response has `0` (closed connection) or `-1` (timeout) as its status.
    """

    kind: str
    outcome: str
    started_s: float  # reading of time.perf_counter, as is `ended_s`
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


async def build_encoder_requests(address: ServerAddress, embedder: str) -> list[KnownRequest]:
    """Ask the server for the right answers, and return the requests."""
    path, is_same = model_path(embedder), partial(is_same_embedding, min_cosine=MIN_COSINE)
    bodies = map(build_inference_body, SENTENCES)
    return [await learn_request(address, "encoder", path, body, is_same) for body in bodies]


async def build_generator_requests(address: ServerAddress, writer: str) -> list[KnownRequest]:
    """Ask the server for the right answers, and return the requests."""
    bodies = [build_completion_body(writer, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
    return [
        await learn_request(address, "generator", COMPLETIONS_PATH, body, is_same_completion)
        for body in bodies
    ]


def build_completion_body(
    model_id: str, prompt: str, max_tokens: int, *, stream: bool = False
) -> bytes:
    """Build the body of a request to COMPLETIONS_PATH, whose answer is the same every time."""
    greedy = {"max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return orjson.dumps({"model": model_id, "prompt": prompt} | greedy)


async def learn_request(
    address: ServerAddress,
    kind: str,
    path: str,
    body: bytes,
    is_same: Callable[[Any, Any], bool],
    parse: Callable[[bytes], Any] = orjson.loads,
) -> KnownRequest:
    """Ask the server once for the right answer. An answer is right if `is_same(right, answer)`.

    Raises BenchmarkError if the request fails.
    """
    raw = build_closing_post(address.prefix + path, body)
    expected = parse(await ask(address, raw))
    return KnownRequest(kind, raw, partial(is_same, expected), parse)


async def ask(address: ServerAddress, raw: bytes) -> bytes:
    """Send a request and return the body. Raise BenchmarkError for a status other than 200."""
    answer = await send_raw(address, raw, TIMEOUT_S)
    return require_ok(answer, "a request of the load", hint="name served models of these ids")


class SteadyLoad:
    """Load generator that sends requests at fixed rates until `stop`."""

    def __init__(self, address: ServerAddress) -> None:
        self.observations: list[Observation] = []
        self._address = address
        self._sender = FixedRateSender()

    def start(self, requests: Iterable[KnownRequest], rate: float) -> None:
        """Send `requests` in an endless cycle, `rate` of them per second, until `stop`."""
        self._sender.start([partial(self._send, request) for request in requests], rate)

    async def stop(self) -> None:
        """Send no more requests, and wait for the pending answers.

        Raises BenchmarkError if the check of an answer failed with an unexpected exception.
        """
        await self._sender.stop()

    async def _send(self, request: KnownRequest) -> None:
        started_s = time.perf_counter()
        answer = await send_raw(self._address, request.raw, TIMEOUT_S)
        outcome = classify_answer(request, answer)
        self.observations.append(Observation(request.kind, outcome, started_s, time.perf_counter()))


def classify_answer(request: KnownRequest, answer: HttpExchange) -> str:
    """Return RIGHT, WRONG or CUT for an answer with status 200, else the status as text."""
    if answer.status != 200:
        return str(answer.status)
    if answer.is_cut:
        return CUT
    try:
        return RIGHT if request.is_right(request.parse(answer.body)) else WRONG
    except StreamCut:
        return CUT
    except (ValueError, KeyError, IndexError, TypeError):
        return WRONG
