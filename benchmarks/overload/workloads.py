"""Workloads of the overload benchmark: requests, deadline, and comparison of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from benchmarks.common.agreement import is_same_completion, is_same_embedding
from benchmarks.common.http import Client, ServerAddress, build_inference_body, task_path
from benchmarks.common.options import DEFAULT_GENERATOR, DEFAULT_MODEL
from benchmarks.generation.http_system import PATH
from deployments.artifacts.types import TaskName

# Embeddings of one text differ by rounding between an unbatched and a batched pass.
MIN_COSINE = 0.95
PROMPTS = 8  # distinct prompts of a generation workload
SENTENCES = 256


@dataclass(frozen=True, slots=True)
class OverloadWorkload:
    """Requests of one kind, and settings of the loops that send `bodies` in an endless cycle."""

    name: str
    path: str
    bodies: Sequence[bytes]
    # Deadline stated in each request of the open loops. The requests of the closed loop, which
    # measures the capacity, state 60 s.
    timeout_s: float
    connections: int  # number of connections of the closed loop that measures the capacity
    capacity_s: float  # length of the measured window of this closed loop
    window_s: float  # length of the measured window of each open loop, after `timeout_s` of load
    is_equal: Callable[[Any, Any], bool]  # compares two decoded answers

    def build_requests(self, address: ServerAddress, timeout_s: float) -> list[bytes]:
        """Build HTTP requests that state the deadline `timeout_s`."""
        headers = {"x-request-timeout-ms": str(round(timeout_s * 1e3))}
        return [address.build_post(self.path, body, headers) for body in self.bodies]

    def answer_alone(self, address: ServerAddress) -> list[Any]:
        """Send one body after the other, so that none is batched. Return the answers.

        Raises BenchmarkError if a request fails.
        """
        with Client(address) as client:
            return [client.post(self.path, body).value for body in self.bodies]


def sentences(texts: Sequence[str]) -> OverloadWorkload:
    bodies = [build_inference_body(text) for text in texts[:SENTENCES]]
    path = task_path(TaskName.FEATURE_EXTRACTION, DEFAULT_MODEL)
    is_equal = partial(is_same_embedding, min_cosine=MIN_COSINE)
    return OverloadWorkload("sentences", path, bodies, 1.0, 64, 8.0, 10.0, is_equal)


def short_answers(texts: Sequence[str]) -> OverloadWorkload:
    return _answers("short answers", texts, 16, timeout_s=2.0, capacity_s=12.0, window_s=12.0)


def long_answers(texts: Sequence[str]) -> OverloadWorkload:
    return _answers("long answers", texts, 120, timeout_s=8.0, capacity_s=24.0, window_s=24.0)


def _answers(
    name: str,
    texts: Sequence[str],
    tokens: int,
    *,
    timeout_s: float,
    capacity_s: float,
    window_s: float,
) -> OverloadWorkload:
    """Build a workload of two-sentence prompts with greedy answers of `tokens` tokens."""
    bodies = [
        orjson.dumps(
            {
                "model": DEFAULT_GENERATOR,
                "prompt": " ".join(texts[2 * number : 2 * number + 2]),
                "max_tokens": tokens,
                "min_tokens": tokens,
                "temperature": 0,
            }
        )
        for number in range(PROMPTS)
    ]
    return OverloadWorkload(
        name, PATH, bodies, timeout_s, 10, capacity_s, window_s, is_same_completion
    )


WORKLOADS: Mapping[str, Callable[[Sequence[str]], OverloadWorkload]] = {
    "sentences": sentences,
    "short": short_answers,
    "long": long_answers,
}
