"""What every family tells about an answer, or a failure, in headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.errors import ServeError
from deployments.generation.messages import Completion
from deployments.ingress.generation import GenerationResponse, GenerationStream
from deployments.ingress.service import InferenceResponse

# What the headers of answers say, for the documentation.
GENERATION_HEADERS: Mapping[str, str] = {
    "x-compute-type": "What computed: the device and its precision, or `cache`.",
    "x-compute-time": (
        "From the parsed body to the answer, in seconds; in whole milliseconds where "
        "text-embeddings-inference is spoken. Not told of a stream."
    ),
    "x-compute-tokens": "Tokens read and generated, special tokens included. Not told of a stream.",
    "x-sha": "The revision of the model's source.",
    "server-timing": "Where the time went, in milliseconds. Not told of a stream.",
}
REPLY_HEADERS: Mapping[str, str] = {
    **GENERATION_HEADERS,
    "x-compute-characters": "Characters of all texts.",
    "x-cache": "`hit` when the answer was kept from an earlier request, else `miss`.",
}


def reply_headers(reply: InferenceResponse) -> dict[str, str]:
    """What the hosted API told in headers (seconds), and where the time went (milliseconds)."""
    timings = reply.result.timings
    headers = {
        "x-compute-type": reply.result.compute_type,
        "x-compute-time": f"{reply.total_s:.4f}",
        "x-compute-characters": str(reply.characters),
        "x-compute-tokens": str(timings.tokens),
        "x-cache": "hit" if reply.from_cache else "miss",
        "x-sha": reply.model.manifest.source.revision,
        "server-timing": (
            f"tokenization;dur={timings.tokenize_s * 1e3:.2f}, queue;dur={timings.queue_s * 1e3:.2f}, "
            f"forward;dur={timings.forward_s * 1e3:.2f}, total;dur={reply.total_s * 1e3:.2f}"
        ),
    }
    if reply.result.truncated:
        cut = f"{reply.result.truncated} of {reply.items} texts"
        limit = reply.model.manifest.max_tokens
        headers["x-hf-warning"] = f"input-truncated; {cut} cut to {limit} tokens"
    return headers


def generation_headers(reply: GenerationResponse) -> dict[str, str]:
    """As `reply_headers`, for text that was generated."""
    completions = (*reply.completions, *reply.discarded)
    return {
        "x-compute-type": completions[0].started.compute_type,
        "x-compute-time": f"{reply.total_s:.4f}",
        "x-compute-tokens": str(reply.timings.tokens),
        "x-sha": reply.model.manifest.source.revision,
        "server-timing": generation_timing(completions, reply.total_s),
    }


def stream_headers(stream: GenerationStream) -> dict[str, str]:
    """What is known of generated text when the first of it comes."""
    return {
        "x-compute-type": stream.started[0].compute_type,
        "x-sha": stream.model.manifest.source.revision,
    }


def generated_tokens(completions: Sequence[Completion]) -> int:
    """Tokens of all answers, end tokens included."""
    return sum(one.finished.generated_tokens for one in completions)


def generation_timing(completions: Sequence[Completion], total_s: float) -> str:
    """`Server-Timing`: the longest that any of the answers took, in milliseconds."""
    timings = [one.finished.timings for one in completions]
    longest_s = {
        "queue": max(one.queue_s for one in timings),
        "prefill": max(one.prefill_s for one in timings),
        "decode": max(one.decode_s for one in timings),
        "total": total_s,
    }
    return ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in longest_s.items())


def retry_headers(error: ServeError) -> dict[str, str]:
    """`Retry-After` in whole seconds, where trying again makes sense."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}
