"""What text-generation-inference tells in headers beside what every family does."""

from __future__ import annotations

from deployments.ingress.families.text_generation.questions import Asked
from deployments.ingress.generation import GenerationReply, GenerationStream
from deployments.ingress.http.replies import (
    generated_tokens,
    generation_headers,
    stream_headers,
)


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
