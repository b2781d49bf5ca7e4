"""Response parts that chat and text completions share."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence

from deployments.ingress.apis.openai.schemas import (
    FinishReasonWord,
    GenerationUsage,
    ResponseIdentity,
    StreamTimings,
)
from deployments.ingress.requests import GenerationResponse
from deployments.messages import (
    Chunk,
    Completion,
    Finished,
    FinishReason,
    Started,
    Token,
    merge_timings,
)
from deployments.registry import RegisteredModel

FINISH_REASONS: Mapping[FinishReason, FinishReasonWord] = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
}
MIN_LOGPROB = -9999.0  # OpenAI's value for probability 0; JSON has no infinity


def build_identity(model: RegisteredModel, object_type: str, id_prefix: str) -> ResponseIdentity:
    return ResponseIdentity(
        id=f"{id_prefix}-{uuid.uuid4().hex}",
        object=object_type,
        created=int(time.time()),
        model=model.ref.id,
        system_fingerprint=model.ref.version,
    )


def build_usage(
    started: Sequence[Started], finished: Sequence[Finished], choices_per_prompt: int
) -> GenerationUsage:
    """Count the tokens of all choices, and of each prompt once.

    `started` has one element per choice, prompt by prompt.
    """
    prompts = started[::choices_per_prompt]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(choice.generated_tokens for choice in finished)
    usage = GenerationUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details={"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)},
    )
    if reasoning_tokens := sum(choice.reasoning_tokens for choice in finished):
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def build_timings(finished: Sequence[Finished]) -> StreamTimings:
    """Return the longest time of each phase among the choices.

    These times replace the header `server-timing`, which streams lack.
    """
    slowest = merge_timings(choice.timings for choice in finished)
    return {
        "tokenize_ms": round(slowest.tokenize_s * 1e3, 2),
        "queue_ms": round(slowest.queue_s * 1e3, 2),
        "prefill_ms": round(slowest.prefill_s * 1e3, 2),
        "decode_ms": round(slowest.decode_s * 1e3, 2),
    }


def build_response_usage(response: GenerationResponse, choices_per_prompt: int) -> GenerationUsage:
    """Count the tokens of a response, including the completions that `best_of` discarded."""
    started = [completion.started for completion in response.completions]
    completions = (*response.completions, *response.discarded)
    finished = [completion.finished for completion in completions]
    return build_usage(started, finished, choices_per_prompt)


class AlignedTokens:
    """Tokens of a text for the logprobs, released together with their characters.

    The tokens of the reasoning and of a stop string are dropped, because the text does not have
    their characters.
    """

    def __init__(self) -> None:
        self._pending: deque[Token] = deque()
        self._start = 0  # characters before the first pending token
        self._end = 0  # characters of the text so far

    def take(self, part: Chunk | Completion) -> list[Token]:
        """Add `part`, and return the tokens that begin within the text so far.

        The last part releases all tokens, unless a stop string ended the text.
        """
        self._pending += (token for token in part.tokens if not token.reasoning)
        self._end += len(part.text)
        finished = part.finished
        is_whole = finished is not None and finished.reason is not FinishReason.STOP
        taken = []
        while self._pending and (is_whole or self._start < self._end):
            token = self._pending.popleft()
            self._start += len(token.text)
            taken.append(token)
        return taken


def clamp_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
