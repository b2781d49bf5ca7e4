"""Routes of OpenAI's API: embeddings and text generation.

POST /v1/embeddings  /embeddings  /models/{id}/v1/embeddings
POST /v1/chat/completions  /models/{id}/v1/chat/completions
POST /v1/completions  /models/{id}/v1/completions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField, ServeError
from deployments.ingress.apis.openai.chat import build_chat_response, encode_chat_stream
from deployments.ingress.apis.openai.completions import (
    build_completion_response,
    encode_completion_stream,
)
from deployments.ingress.apis.openai.embeddings import (
    EMBEDDING_FIELDS,
    UNSUPPORTED_EMBEDDING_FIELDS,
    EmbeddingsRequest,
    EmbeddingsResponse,
    build_embedding_objects,
)
from deployments.ingress.apis.openai.requests import (
    field_names,
    parse_chat_request,
    parse_completion_request,
)
from deployments.ingress.apis.openai.schemas import (
    ChatBody,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionBody,
    CompletionChunk,
    CompletionResponse,
    OpenAIError,
)
from deployments.ingress.apis.openai.streaming import encode_error
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.generation_answers import (
    ParsedGeneration,
    answer_generation,
)
from deployments.ingress.apis.shared.inference_requests import build_inference_request
from deployments.ingress.apis.shared.openai_error import ErrorObject, build_openai_error
from deployments.ingress.apis.shared.response_headers import (
    CHAT_HEADERS,
    GENERATION_HEADERS,
    INFERENCE_HEADERS,
    error_headers,
    generation_error_headers,
    inference_headers,
)
from deployments.ingress.apis.shared.token_usage import build_embeddings_usage
from deployments.ingress.apis.shared.unsupported_fields import reject_unsupported_fields
from deployments.ingress.http.api import Access, ErrorFormat, Operation, build_schema, parse_body
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields, replace_status_422
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.token_ids import parse_token_ids
from deployments.registry import RegisteredModel

EXAMPLE_CHAT = {
    "messages": [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is a river?"},
    ],
    "max_tokens": 40,
}


def openai_error(error: ServeError) -> Response:
    headers = error_headers(error, should_retry=error.retryable)
    return build_error_response(error, build_openai_error(error), headers)


def generation_error(error: ServeError) -> Response:
    error_object = build_openai_error(error, for_generation=True)
    return build_error_response(error, error_object, generation_error_headers(error))


def build_error_response(
    error: ServeError, error_object: ErrorObject, headers: Mapping[str, str]
) -> Response:
    # OpenAI's API has no 422.
    return json_response({"error": error_object}, status=replace_status_422(error), headers=headers)


OPENAI_ERROR_FORMAT = ErrorFormat("OpenAI", openai_error, replace_status_422)
GENERATION_ERROR_FORMAT = ErrorFormat("OpenAI", generation_error, replace_status_422)

build_generation_operation = partial(
    Operation,
    method="POST",
    access=Access.INFER,
    runs_model=True,
    headers=GENERATION_HEADERS,
    error_formats=(GENERATION_ERROR_FORMAT,),
)


def parse_chat(body: ChatBody, model: RegisteredModel, options: RequestOptions) -> ParsedGeneration:
    return ParsedGeneration(
        request=parse_chat_request(body, model, options),
        field_names=field_names(body),
        build=lambda response: build_chat_response(response, body),
        encode=lambda stream: encode_chat_stream(stream, body),
        encode_error=encode_error,
    )


def parse_completion(
    body: CompletionBody, model: RegisteredModel, options: RequestOptions
) -> ParsedGeneration:
    request = parse_completion_request(body, model, options)
    return ParsedGeneration(
        request=request,
        field_names=field_names(body),
        build=lambda response: build_completion_response(response, request, body),
        encode=lambda stream: encode_completion_stream(stream, request, body),
        encode_error=encode_error,
    )


class OpenAIRoutes:
    """Handlers of OpenAI's API."""

    name: ClassVar = "OpenAI"
    error_format: ClassVar = OPENAI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        return (
            Operation(
                method="POST",
                paths=("/v1/embeddings", "/embeddings", "/models/{id:path}/v1/embeddings"),
                handler=self.embeddings,
                summary="Embeddings of texts",
                access=Access.INFER,
                body=build_schema(EmbeddingsRequest),
                response=build_schema(EmbeddingsResponse),
                examples={"two texts": {"input": ["A cat.", "A kitten."]}},
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
            build_generation_operation(
                paths=("/v1/chat/completions", "/models/{id:path}/v1/chat/completions"),
                handler=self.chat,
                summary="The next message of a conversation",
                headers=CHAT_HEADERS,
                body=build_schema(ChatBody),
                response=build_schema(ChatCompletion),
                examples={"a question": EXAMPLE_CHAT},
                events=build_schema(ChatCompletionChunk | OpenAIError),
            ),
            build_generation_operation(
                paths=("/v1/completions", "/models/{id:path}/v1/completions"),
                handler=self.completions,
                summary="The continuation of texts",
                body=build_schema(CompletionBody),
                response=build_schema(CompletionResponse),
                examples={"a text": {"prompt": "Once upon a time", "max_tokens": 20}},
                events=build_schema(CompletionChunk | OpenAIError),
            ),
        )

    async def embeddings(self, request: Request) -> Response:
        limits = self._pipeline.settings.limits
        body = parse_body(EmbeddingsRequest, await read_json_object(request, limits))
        if body.input is None:
            raise InvalidField("`input` is required", field="input")
        reject_unsupported_fields(body, UNSUPPORTED_EMBEDDING_FIELDS)
        with rename_error_fields(EMBEDDING_FIELDS):
            response = await self._pipeline.infer(
                build_inference_request(
                    request,
                    body,
                    parse_token_ids(body.input),
                    TaskName.FEATURE_EXTRACTION,
                    body.parameters,
                )
            )
        return json_response(
            {
                "object": "list",
                "data": build_embedding_objects(
                    response.result.value, body.encoding_format or "float"
                ),
                "model": response.model.ref.id,
                "usage": build_embeddings_usage(response),
            },
            headers=inference_headers(response),
        )

    async def chat(self, request: Request) -> Response:
        return await answer_generation(self._pipeline, request, ChatBody, parse_chat, for_chat=True)

    async def completions(self, request: Request) -> Response:
        return await answer_generation(self._pipeline, request, CompletionBody, parse_completion)
