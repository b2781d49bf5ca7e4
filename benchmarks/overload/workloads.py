"""Workloads of the overload benchmark: requests, their deadline, and whether an answer is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, task_path
from benchmarks.generation.http import PATH, HttpGenerator
from deployments.artifacts.types import TaskName

GENERATOR = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
# Embeddings of a text alone and beside others differ by rounding.
MIN_COSINE = 0.95
PROMPTS = 8  # distinct ones of a workload for generators
SENTENCES = 256


@dataclass(frozen=True, slots=True)
class OverloadWorkload:
    """One kind of request. `bodies` are distinct."""

    name: str
    path: str
    bodies: Sequence[bytes]
    timeout_s: float  # deadline that the client says
    connections: int  # of the closed loop that measures the capacity
    capacity_s: float  # its window
    window_s: float  # of each open loop, after one deadline
    is_equal: Callable[[Any, Any], bool]  # of two decoded answers

    def build_requests(self, address: ServerAddress, timeout_s: float) -> list[bytes]:
        """Build HTTP requests that say a deadline."""
        headers = {"x-request-timeout-ms": str(round(timeout_s * 1e3))}
        return [address.build_post(self.path, body, headers) for body in self.bodies]

    def answer_alone(self, address: ServerAddress) -> list[Any]:
        """Return the answer to each body, one after the other. Raise BenchmarkError."""
        client = HttpGenerator(address, self.name)

        async def ask() -> list[Any]:
            answers = []
            for body in self.bodies:
                status, content = await client.post(self.path, body)
                if status != 200:
                    raise BenchmarkError(
                        f"`{self.name}`: {status}: {content[:200]!r}", hint="look at the server"
                    )
                answers.append(orjson.loads(content))
            return answers

        return asyncio.run(ask())


def sentences(texts: Sequence[str]) -> OverloadWorkload:
    bodies = [build_inference_body(text) for text in texts[:SENTENCES]]
    path = task_path(TaskName.FEATURE_EXTRACTION, ENCODER)
    return OverloadWorkload("sentences", path, bodies, 1.0, 64, 8.0, 10.0, _is_same_embedding)


def short_answers(texts: Sequence[str]) -> OverloadWorkload:
    return _answers("short answers", texts, 16, timeout_s=2.0, capacity_s=8.0, window_s=8.0)


def long_answers(texts: Sequence[str]) -> OverloadWorkload:
    return _answers("long answers", texts, 120, timeout_s=8.0, capacity_s=8.0, window_s=10.0)


def _answers(
    name: str,
    texts: Sequence[str],
    tokens: int,
    *,
    timeout_s: float,
    capacity_s: float,
    window_s: float,
) -> OverloadWorkload:
    """Prompts of two sentences with greedy answers of `tokens` tokens."""
    bodies = [
        orjson.dumps(
            {
                "model": GENERATOR,
                "prompt": " ".join(texts[2 * number : 2 * number + 2]),
                "max_tokens": tokens,
                "min_tokens": tokens,
                "temperature": 0,
            }
        )
        for number in range(PROMPTS)
    ]
    return OverloadWorkload(
        name, PATH, bodies, timeout_s, 10, capacity_s, window_s, _is_same_completion
    )


WORKLOADS: Mapping[str, Callable[[Sequence[str]], OverloadWorkload]] = {
    "sentences": sentences,
    "short": short_answers,
    "long": long_answers,
}


def _is_same_completion(expected: Any, answer: Any) -> bool:
    return bool(expected["choices"][0]["text"] == answer["choices"][0]["text"])


def _is_same_embedding(expected: Any, answer: Any) -> bool:
    first, second = (np.ravel(np.asarray(each, np.float64)) for each in (expected, answer))
    if first.shape != second.shape:
        return False
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) >= MIN_COSINE * norms
