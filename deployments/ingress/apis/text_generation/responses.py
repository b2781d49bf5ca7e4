"""Errors as text-generation-inference tells them: `error_type` in lower case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.responses import Response

from deployments.errors import (
    ArtifactError,
    BadSetting,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownParameter,
    UnknownToken,
    WrongTask,
)
from deployments.generation.messages import Completion, FinishReason, Token, TopLogprob
from deployments.ingress.apis.response_headers import (
    GENERATION_HEADERS,
    generated_tokens,
    generation_headers,
    retry_headers,
    stream_headers,
)
from deployments.ingress.apis.text_generation.requests import GenerateRequest
from deployments.ingress.apis.text_generation.schemas import (
    BestOfSequence,
    Details,
    FinishWord,
    Generated,
    GenerationDetails,
    TokenDetails,
)
from deployments.ingress.generation import GenerationResponse, GenerationStream
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.errors import status_and_type

# Those of `tgi_response_headers`; of a stream, as far as they are known when it begins.
TGI_HEADERS: Mapping[str, str] = {
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


def tgi_response_headers(reply: GenerationResponse, asked: GenerateRequest) -> dict[str, str]:
    """Tokens of all answers together; times in whole milliseconds, of the slowest answer."""
    computed = (*reply.completions, *reply.discarded)
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
        **tgi_request_headers(asked),
        "x-prompt-tokens": str(read),
        "x-generated-tokens": str(generated_tokens(computed)),
        **{name: str(round(seconds * 1e3)) for name, seconds in times_s.items()},
    }


def tgi_stream_headers(stream: GenerationStream, asked: GenerateRequest) -> dict[str, str]:
    """What is known when the first token is."""
    return {
        **stream_headers(stream),
        **tgi_request_headers(asked),
        "x-prompt-tokens": str(stream.started[0].prompt_tokens),
    }


def tgi_request_headers(asked: GenerateRequest) -> dict[str, str]:
    """What the request itself says."""
    return {"x-compute-characters": str(sum(map(len, asked.prompts)))}


FINISH_REASONS: Mapping[FinishReason, FinishWord] = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "eos_token",
    FinishReason.STOP: "stop_sequence",
}


def build_generate_responses(
    reply: GenerationResponse, asked: GenerateRequest
) -> list[list[Generated]]:
    """The answers to each prompt."""
    count = len(asked.prompts)
    told = split_evenly(reply.completions, count)
    others = split_evenly(reply.discarded, count)
    return [
        [GenerateResponseBuilder(prompt, asked).answer(one, others[place]) for one in told[place]]
        for place, prompt in enumerate(asked.prompts)
    ]


def split_evenly(completions: Sequence[Completion], count: int) -> list[Sequence[Completion]]:
    """`completions` in `count` runs of the same length."""
    size = len(completions) // count
    return [completions[i * size : (i + 1) * size] for i in range(count)]


@dataclass(frozen=True, slots=True)
class GenerateResponseBuilder:
    """Tells what came for one of the prompts."""

    prompt: str
    asked: GenerateRequest

    def answer(self, told: Completion, discarded: Sequence[Completion]) -> Generated:
        """An answer, and where details are wanted those that it was chosen from."""
        answer = Generated(generated_text=self.asked.shown(self.prompt, told.text))
        if self.asked.parameters.includes_details:
            # Facts are details of which no key that may be missing is there.
            details = cast("Details", self._build_details(told))
            if discarded:
                details["best_of_sequences"] = [self._build_best_of(one) for one in discarded]
            answer["details"] = details
        return answer

    def _build_best_of(self, told: Completion) -> BestOfSequence:
        text = self.asked.shown(self.prompt, told.text)
        return BestOfSequence(generated_text=text, **self._build_details(told))

    def _build_details(self, told: Completion) -> GenerationDetails:
        facts = GenerationDetails(
            finish_reason=FINISH_REASONS[told.finished.reason],
            generated_tokens=told.finished.generated_tokens,
            seed=self.asked.reported_seed(told.started),
            prefill=[
                {"id": token.id, "text": token.text, "logprob": token.logprob}
                for token in told.started.prompt
            ],
            tokens=[build_token_details(token) for token in told.tokens],
        )
        if self.asked.parameters.top_n_tokens:
            facts["build_top_tokens"] = [build_top_tokens(token) for token in told.tokens]
        return facts


def build_token_details(token: Token | TopLogprob) -> TokenDetails:
    """One token, which came or might have come."""
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
    }


def build_top_tokens(token: Token) -> list[TokenDetails]:
    """The likeliest tokens in its place."""
    return [build_token_details(one) for one in token.alternatives]


VALIDATION_ERROR, GENERATION_ERROR = "validation", "generation"
INCOMPLETE_ERROR, OVERLOADED_ERROR = "incomplete_generation", "overloaded"

# Status and `error_type` by kind of error; others keep their status. These four types are all that
# huggingface_hub has exceptions for.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    # Of all statuses only this one makes huggingface_hub try again without what was not known.
    UnknownParameter: (400, VALIDATION_ERROR),
    EmptyInput: (422, VALIDATION_ERROR),
    InvalidField: (422, VALIDATION_ERROR),
    UnknownToken: (422, VALIDATION_ERROR),
    InputTooLong: (422, VALIDATION_ERROR),
    TooManyItems: (422, VALIDATION_ERROR),
    HardwareUnavailable: (422, VALIDATION_ERROR),
    WrongTask: (424, GENERATION_ERROR),
    EngineFailed: (424, GENERATION_ERROR),
    Overloaded: (429, OVERLOADED_ERROR),
    ModelLoading: (503, OVERLOADED_ERROR),
    ArtifactError: (503, GENERATION_ERROR),
    DeadlineExceeded: (504, INCOMPLETE_ERROR),
    BadSetting: (500, GENERATION_ERROR),
}


def build_tgi_error(error: ServeError) -> tuple[int, dict[str, Any]]:
    """Status and body; the body is also an event of its own in the middle of a stream."""
    status, kind = status_and_type(error, ERRORS, refused=VALIDATION_ERROR, failed=INCOMPLETE_ERROR)
    body: dict[str, Any] = {"error": error.message, "error_type": kind, "code": error.code}
    if isinstance(error, ModelLoading):
        body["estimated_time"] = error.estimated_time_s
    return status, body


def build_tgi_response(error: ServeError) -> Response:
    """The error as an answer of its own."""
    status, body = build_tgi_error(error)
    return json_response(body, status=status, headers=retry_headers(error))
