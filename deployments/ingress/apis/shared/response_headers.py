"""Response headers that the APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.artifacts.types import Device
from deployments.errors import DeadlineExceeded, ServeError
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.error_responses import retry_headers
from deployments.ingress.requests import GenerationResponse, InferenceResponse
from deployments.messages import Completion, Started, merge_timings

# Descriptions for the OpenAPI document.
GENERATION_HEADERS: Mapping[str, str] = {
    "x-compute-type": "Device and precision of the computation, or `cache`.",
    "x-compute-time": (
        "Seconds from the parsed body to the response; whole milliseconds in the API of "
        "text-embeddings-inference. Not in streams."
    ),
    "x-compute-tokens": "Input and generated tokens, special tokens included. Not in streams.",
    "x-compute-fallback": "`cpu` if `use_gpu` was requested and no GPU was available.",
    "x-sha": "Version of the model that answered; `id@version` names it.",
    "server-timing": "Milliseconds of each phase. Not in streams.",
}
CHAT_HEADERS: Mapping[str, str] = {
    **GENERATION_HEADERS,
    "x-hf-warning": "`tools-ignored` if the chat template of the model does not use `tools`.",
}
INFERENCE_HEADERS: Mapping[str, str] = {
    **GENERATION_HEADERS,
    "x-compute-characters": "Characters of all texts.",
    "x-cache": "`hit` if the response comes from the response cache, else `miss`.",
    "x-hf-warning": "`input-truncated` and the number of texts that were cut, if any was.",
}


def inference_headers(response: InferenceResponse) -> dict[str, str]:
    """Build the headers of a response of an encoder model.

    `x-compute-time` is in seconds, as in Hugging Face's hosted API. `server-timing` is in
    milliseconds.
    """
    timings = response.result.timings
    headers = {
        "x-compute-type": response.result.compute_type,
        "x-compute-time": f"{response.total_s:.4f}",
        "x-compute-characters": str(response.characters),
        "x-compute-tokens": str(timings.tokens),
        "x-cache": "hit" if response.from_cache else "miss",
        "x-sha": response.model.ref.version,
        "server-timing": (
            f"tokenization;dur={timings.tokenize_s * 1e3:.2f}, "
            f"queue;dur={timings.queue_s * 1e3:.2f}, "
            f"forward;dur={timings.forward_s * 1e3:.2f}, total;dur={response.total_s * 1e3:.2f}"
        ),
    }
    headers |= fallback_headers(response.fallback)
    if response.truncation:
        headers["x-hf-warning"] = f"input-truncated; {response.truncation}"
    return headers


def generation_headers(response: GenerationResponse) -> dict[str, str]:
    completions = (*response.completions, *response.discarded)
    return {
        "x-compute-type": completions[0].started.compute_type,
        "x-compute-time": f"{response.total_s:.4f}",
        "x-compute-tokens": str(response.timings.tokens),
        "x-sha": response.model.ref.version,
        "server-timing": generation_timing(completions, response.total_s),
        **fallback_headers(response.fallback),
        **tool_headers(completions[0].started),
    }


def stream_headers(stream: GenerationStream) -> dict[str, str]:
    """Return the headers of a stream: only values that are known when the stream starts."""
    return {
        "x-compute-type": stream.started[0].compute_type,
        "x-sha": stream.model.ref.version,
        **fallback_headers(stream.fallback),
        **tool_headers(stream.started[0]),
    }


def error_headers(error: ServeError, *, should_retry: bool) -> dict[str, str]:
    """Build the headers of an error for the clients of OpenAI and Anthropic.

    Without `x-should-retry` these clients retry each 5xx twice. Most retries would fail again.
    """
    return {**retry_headers(error), "x-should-retry": str(should_retry).lower()}


def generation_error_headers(error: ServeError) -> dict[str, str]:
    # Tell clients not to retry after a missed deadline. A retry would exceed the same deadline, and
    # generations that run until their deadline cost the most.
    is_late = isinstance(error, DeadlineExceeded)
    return error_headers(error, should_retry=error.retryable and not is_late)


def fallback_headers(fallback: Device | None) -> dict[str, str]:
    """Return a header with the device that replaced the requested GPU; empty without fallback."""
    return {} if fallback is None else {"x-compute-fallback": fallback.value}


def tool_headers(started: Started) -> dict[str, str]:
    """Return a header with a warning if the model cannot see the tools of the request."""
    if not started.ignores_tools:
        return {}
    return {"x-hf-warning": "tools-ignored; the chat template of the model does not use `tools`"}


def generated_tokens(completions: Sequence[Completion]) -> int:
    """Count the tokens of all completions, end tokens included."""
    return sum(completion.finished.generated_tokens for completion in completions)


def generation_timing(completions: Sequence[Completion], total_s: float) -> str:
    """Build `server-timing` in milliseconds.

    Each phase has the maximum of all completions. The total is that of the request.
    """
    slowest = merge_timings(completion.finished.timings for completion in completions)
    slowest_s = {
        "tokenization": slowest.tokenize_s,
        "queue": slowest.queue_s,
        "prefill": slowest.prefill_s,
        "decode": slowest.decode_s,
        "total": total_s,
    }
    return ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in slowest_s.items())
