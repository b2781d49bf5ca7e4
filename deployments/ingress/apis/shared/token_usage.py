"""Token counts of responses that generate nothing, as OpenAI's object `usage`."""

from __future__ import annotations

from typing_extensions import TypedDict

from deployments.ingress.requests import InferenceResponse


class Usage(TypedDict):
    """Token counts, special tokens included."""

    prompt_tokens: int
    total_tokens: int


def build_embeddings_usage(response: InferenceResponse) -> Usage:
    """Count the tokens. All of them belong to the prompt, because nothing is generated."""
    tokens = response.result.timings.tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}
