"""Responses, headers and errors of text-generation-inference's API."""

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
    Forbidden,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    Unauthorized,
    UnknownParameter,
    UnknownToken,
    WrongTask,
)
from deployments.ingress.apis.shared.response_headers import (
    GENERATION_HEADERS,
    generated_tokens,
    generation_headers,
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
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import retry_headers
from deployments.ingress.http.errors import status_and_type
from deployments.ingress.requests import GenerationResponse
from deployments.messages import Completion, FinishReason, Token, TopLogprob

# Descriptions of the headers of `tgi_response_headers`, for the OpenAPI document. Streams have only
# headers that are known at the first token.
TGI_HEADERS: Mapping[str, str] = {
    **GENERATION_HEADERS,
    "x-compute-characters": "Characters of all prompts.",
    "x-prompt-tokens": "Tokens of all prompts.",
    "x-generated-tokens": "Generated tokens, end tokens included. Not in streams.",
    "x-total-time": "Milliseconds from the parsed body to the response. Not in streams.",
    "x-validation-time": "Milliseconds neither queued nor in inference. Not in streams.",
    "x-queue-time": "Milliseconds until a KV slot was free. Not in streams.",
    "x-inference-time": "Milliseconds of prefill and decoding. Not in streams.",
    "x-time-per-token": "`x-inference-time` per generated token. Not in streams.",
}
FINISH_REASONS: Mapping[FinishReason, FinishWord] = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "eos_token",
    FinishReason.STOP: "stop_sequence",
}


def tgi_response_headers(
    response: GenerationResponse, tgi_request: GenerateRequest
) -> dict[str, str]:
    """Build the headers. The times of phases are those of the slowest sequence.

    Generated tokens count for all sequences, discarded ones included. The tokens of a prompt count
    once.
    """
    completions = (*response.completions, *response.discarded)
    slowest = max((c.finished for c in completions), key=lambda finished: sum(finished.timings))
    inference_s = slowest.timings.prefill_s + slowest.timings.decode_s
    times_s = {
        "x-total-time": response.total_s,
        "x-validation-time": max(0.0, response.total_s - slowest.timings.queue_s - inference_s),
        "x-queue-time": slowest.timings.queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, slowest.generated_tokens),
    }
    choices_per_prompt = len(response.completions) // len(tgi_request.prompts)
    prompt_tokens = sum(
        completion.started.prompt_tokens
        for completion in response.completions[::choices_per_prompt]
    )
    return {
        **generation_headers(response),
        **tgi_request_headers(tgi_request),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens(completions)),
        **{name: str(round(seconds * 1e3)) for name, seconds in times_s.items()},
    }


def tgi_stream_headers(stream: GenerationStream, tgi_request: GenerateRequest) -> dict[str, str]:
    return {
        **stream_headers(stream),
        **tgi_request_headers(tgi_request),
        "x-prompt-tokens": str(stream.started[0].prompt_tokens),
    }


def tgi_request_headers(tgi_request: GenerateRequest) -> dict[str, str]:
    return {"x-compute-characters": str(sum(map(len, tgi_request.prompts)))}


def build_generate_responses(
    response: GenerationResponse, tgi_request: GenerateRequest
) -> list[list[Generated]]:
    """Return a list of sequences for each prompt."""
    prompts = tgi_request.prompts
    completions = split_evenly(response.completions, len(prompts))
    discarded = split_evenly(response.discarded, len(prompts))
    return [
        [
            GenerateResponseBuilder(prompt, tgi_request).build(completion, discarded[index])
            for completion in completions[index]
        ]
        for index, prompt in enumerate(prompts)
    ]


def split_evenly(completions: Sequence[Completion], count: int) -> list[Sequence[Completion]]:
    """Split `completions` into `count` parts, one per prompt. All parts have the same length."""
    size = len(completions) // count
    return [completions[i * size : (i + 1) * size] for i in range(count)]


@dataclass(frozen=True, slots=True)
class GenerateResponseBuilder:
    prompt: str
    tgi_request: GenerateRequest

    def build(self, completion: Completion, discarded: Sequence[Completion]) -> Generated:
        """Build one sequence. Its details contain the `discarded` sequences of `best_of`."""
        text = self.tgi_request.format_text(self.prompt, completion.text)
        generated = Generated(generated_text=text)
        if self.tgi_request.parameters.includes_details:
            # Details are GenerationDetails plus keys that may be absent.
            details = cast("Details", self._build_details(completion))
            if discarded:
                details["best_of_sequences"] = list(map(self._build_best_of, discarded))
            generated["details"] = details
        return generated

    def _build_best_of(self, completion: Completion) -> BestOfSequence:
        text = self.tgi_request.format_text(self.prompt, completion.text)
        return BestOfSequence(generated_text=text, **self._build_details(completion))

    def _build_details(self, completion: Completion) -> GenerationDetails:
        details = GenerationDetails(
            finish_reason=FINISH_REASONS[completion.finished.reason],
            generated_tokens=completion.finished.generated_tokens,
            seed=self.tgi_request.reported_seed(completion.started),
            prefill=[
                {"id": token.id, "text": token.text, "logprob": token.logprob}
                for token in completion.started.prompt
            ],
            tokens=[build_token_details(token) for token in completion.tokens],
        )
        if self.tgi_request.parameters.top_n_tokens:
            details["top_tokens"] = [build_top_tokens(token) for token in completion.tokens]
        return details


def build_token_details(token: Token | TopLogprob) -> TokenDetails:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
    }


def build_top_tokens(token: Token) -> list[TokenDetails]:
    """Return the most likely tokens at the position of `token`."""
    return [build_token_details(alternative) for alternative in token.alternatives]


VALIDATION_ERROR, GENERATION_ERROR = "validation", "generation"
INCOMPLETE_ERROR, OVERLOADED_ERROR = "incomplete_generation", "overloaded"

# Status and `error_type` by error class. huggingface_hub has exceptions only for the types
# `validation`, `generation`, `incomplete_generation` and `overloaded`.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    # 400 makes huggingface_hub retry without the unknown parameter; no other status does.
    UnknownParameter: (400, VALIDATION_ERROR),
    EmptyInput: (422, VALIDATION_ERROR),
    InvalidField: (422, VALIDATION_ERROR),
    UnknownToken: (422, VALIDATION_ERROR),
    InputTooLong: (422, VALIDATION_ERROR),
    TooManyItems: (422, VALIDATION_ERROR),
    HardwareUnavailable: (422, VALIDATION_ERROR),
    Unauthorized: (401, "unauthorized"),
    Forbidden: (403, "forbidden"),
    WrongTask: (424, GENERATION_ERROR),
    EngineFailed: (424, GENERATION_ERROR),
    Overloaded: (429, OVERLOADED_ERROR),
    ModelLoading: (503, OVERLOADED_ERROR),
    ArtifactError: (503, GENERATION_ERROR),
    DeadlineExceeded: (504, INCOMPLETE_ERROR),
    BadSetting: (500, GENERATION_ERROR),
}


def build_tgi_error(error: ServeError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error. A stream sends the body as an event."""
    status, kind = status_and_type(error, ERRORS, refused=VALIDATION_ERROR, failed=INCOMPLETE_ERROR)
    body: dict[str, Any] = {"error": error.message, "error_type": kind, "code": error.code}
    if isinstance(error, ModelLoading) and error.estimated_time_s is not None:
        body["estimated_time"] = error.estimated_time_s
    return status, body


def build_tgi_response(error: ServeError) -> Response:
    status, body = build_tgi_error(error)
    return json_response(body, status=status, headers=retry_headers(error))


def select_tgi_status(error: ServeError) -> int:
    return build_tgi_error(error)[0]


TGI_ERROR_FORMAT = ErrorFormat("text-generation-inference", build_tgi_response, select_tgi_status)
