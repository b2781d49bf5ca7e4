"""Routes of OpenAI's Responses API.

POST /v1/responses  /models/{id}/v1/responses
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.apis.openai.routes import OPENAI_ERROR_FORMAT, build_generation_operation
from deployments.ingress.apis.openai_responses.requests import parse_responses
from deployments.ingress.apis.openai_responses.responses import ResponseBuilder
from deployments.ingress.apis.openai_responses.schemas import (
    ResponseObject,
    ResponsesBody,
    ResponsesEvent,
)
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.generation_answers import (
    ParsedGeneration,
    answer_generation,
)
from deployments.ingress.apis.shared.response_headers import CHAT_HEADERS
from deployments.ingress.http.api import Operation, build_schema
from deployments.ingress.request_options import RequestOptions
from deployments.registry import RegisteredModel

EXAMPLE = {
    "instructions": "Answer in one sentence.",
    "input": "What is a river?",
    "max_output_tokens": 40,
}


def parse(body: ResponsesBody, model: RegisteredModel, options: RequestOptions) -> ParsedGeneration:
    parsed = parse_responses(body, model, options)
    builder = ResponseBuilder(body, parsed, model)
    return ParsedGeneration(
        request=parsed.request,
        field_names=parsed.field_names,
        build=builder.build,
        encode=builder.encode,
        encode_error=builder.encode_error,
    )


class ResponsesRoutes:
    name: ClassVar = "OpenAI Responses"
    error_format: ClassVar = OPENAI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        return (
            build_generation_operation(
                paths=("/v1/responses", "/models/{id:path}/v1/responses"),
                handler=self.respond,
                summary="The answer to a text or a conversation, as a list of items",
                headers=CHAT_HEADERS,
                body=build_schema(ResponsesBody),
                response=build_schema(ResponseObject),
                examples={"a question": EXAMPLE},
                events=build_schema(ResponsesEvent),
            ),
        )

    async def respond(self, request: Request) -> Response:
        return await answer_generation(self._pipeline, request, ResponsesBody, parse, for_chat=True)
