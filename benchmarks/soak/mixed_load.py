"""Requests with known right answers for a long mixed load: several tasks, lists, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from benchmarks.common.agreement import is_same_completion
from benchmarks.common.http import ServerAddress, build_inference_body, model_path
from benchmarks.common.options import DEFAULT_GENERATOR, DEFAULT_MODEL
from benchmarks.faults.load import (
    COMPLETIONS_PATH,
    KnownRequest,
    StreamCut,
    build_completion_body,
    learn_request,
)

CLASSIFIER = "hundredfold/minilm-sst2"
READER = "hundredfold/minilm-squad"
LIST_TEXTS = 16
ANSWER_TOKENS = 24
# Maximum difference between a number in an answer and in the right answer. Rounding depends on the
# batch in which the server computes a text.
TOLERANCE = 0.02
CONTEXT = (
    "The observatory on the hill was built in 1887 by Anna Lindqvist. Its refractor is nine metres "
    "long, and the dome turns on forty wheels."
)
QUESTIONS = ("Who built the observatory?", "How long is the refractor?")
REVIEWS = ("A film of rare warmth.", "Two hours that feel like nine.", "It has its moments.")

# Requests per second by kind.
RATES: Mapping[str, float] = {
    "sentence": 8.0,
    "list": 0.5,
    "label": 3.0,
    "answer": 2.0,
    "completion": 0.5,
    "stream": 0.5,
}


async def build_mixed_requests(address: ServerAddress) -> dict[str, list[KnownRequest]]:
    """Return requests by kind. Ask the server once for the right answer to each request.

    Raises BenchmarkError if a request fails.
    """
    sentences = [f"A sentence of middling length, number {number}." for number in range(64)]
    lists = [sentences[start : start + LIST_TEXTS] for start in range(0, 64, LIST_TEXTS)]
    questions = [{"question": question, "context": CONTEXT} for question in QUESTIONS]
    inputs: dict[str, tuple[str, Sequence[object]]] = {
        "sentence": (DEFAULT_MODEL, sentences),
        "list": (DEFAULT_MODEL, lists),
        "label": (CLASSIFIER, REVIEWS),
        "answer": (READER, questions),
    }
    requests = {
        kind: [
            await learn_request(address, kind, model_path(model), body, is_close)
            for body in map(build_inference_body, values)
        ]
        for kind, (model, values) in inputs.items()
    }
    for kind, parse in (("completion", orjson.loads), ("stream", parse_stream)):
        bodies = [
            build_completion_body(DEFAULT_GENERATOR, prompt, ANSWER_TOKENS, stream=kind == "stream")
            for prompt in ("The sea is", "Once upon a time")
        ]
        requests[kind] = [
            await learn_request(address, kind, COMPLETIONS_PATH, body, is_same_completion, parse)
            for body in bodies
        ]
    return requests


def parse_stream(body: bytes) -> dict[str, Any]:
    """Merge a streamed completion into one response. Raise StreamCut if it is incomplete."""
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise StreamCut
    chunks = [orjson.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        raise StreamCut
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    return {"choices": [{"text": text}]}


def is_close(expected: Any, value: Any) -> bool:
    """Return whether two JSON values are equal; numbers may differ by TOLERANCE."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(
            is_close(item, value[key]) for key, item in expected.items()
        )
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(map(is_close, expected, value))
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return abs(expected - value) <= TOLERANCE
    return bool(expected == value)
