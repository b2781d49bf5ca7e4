"""What text-generation-inference tells in headers beside what every family does."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.ingress.families.text_generation.questions import Asked
from deployments.ingress.generation import GenerationReply, GenerationStream
from deployments.ingress.http.replies import (
    GENERATION_HEADERS,
    generated_tokens,
    generation_headers,
    stream_headers,
)

# Those of `answer_headers`; of a stream, as far as they are known when it begins.
HEADERS: Mapping[str, str] = {
    **GENERATION_HEADERS,
    "x-compute-characters": "Characters of all prompts.",
    "x-prompt-tokens": "Tokens of all prompts.",
    "x-generated-tokens": "Tokens of all answers, end tokens included. Not told of a stream.",
    "x-total-time": "From the parsed body to the answer, in milliseconds. Not told of a stream.",
    "x-validation-time": "What was neither queueing nor inference, in milliseconds; likewise.",
    "x-queue-time": "Until a row was free, in milliseconds; likewise.",
    "x-inference-time": "From then on, in milliseconds; likewise.",
    "x-time-per-token": "`x-inference-time` for each token generated; likewise.",
}


def answer_headers(reply: GenerationReply, asked: Asked) -> dict[str, str]:
    """Tokens of all answers together; times in whole milliseconds, of the slowest answer."""
    computed = (*reply.completions, *reply.passed_over)
    slowest = max((one.finished for one in computed), key=lambda one: sum(one.timings))
    inference_s = slowest.timings.prefill_s + slowest.timings.decode_s
    times_s = {
        "x-total-time": reply.total_s,
        "x-validation-time": max(0.0, reply.total_s - slowest.timings.queue_s - inference_s),
        "x-queue-time": slowest.timings.queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, slowest.generated_tokens),
    }
    answers_each = len(reply.completions) // len(asked.prompts)
    read = sum(one.started.prompt_tokens for one in reply.completions[::answers_each])
    return {
        **generation_headers(reply),
        **asked_headers(asked),
        "x-prompt-tokens": str(read),
        "x-generated-tokens": str(generated_tokens(computed)),
        **{name: str(round(seconds * 1e3)) for name, seconds in times_s.items()},
    }


def streamed_headers(stream: GenerationStream, asked: Asked) -> dict[str, str]:
    """What is known when the first token is."""
    return {
        **stream_headers(stream),
        **asked_headers(asked),
        "x-prompt-tokens": str(stream.started[0].prompt_tokens),
    }


def asked_headers(asked: Asked) -> dict[str, str]:
    """What the request itself says."""
    return {"x-compute-characters": str(sum(map(len, asked.prompts)))}
