"""Routes of OpenAI's Responses API.

POST /v1/responses  /models/{id}/v1/responses
POST /v1/responses/input_tokens  /models/{id}/v1/responses/input_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.apis.openai.routes import OPENAI_ERROR_FORMAT, build_generation_operation
from deployments.ingress.apis.openai_responses.requests import parse_responses
from deployments.ingress.apis.openai_responses.responses import ResponseBuilder
from deployments.ingress.apis.openai_responses.schemas import (
    InputTokenCount,
    ResponseObject,
    ResponsesBody,
    ResponsesEvent,
)
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.generation_answers import (
    ParsedGeneration,
    answer_generation,
    tokenize_chat,
)
from deployments.ingress.apis.shared.response_headers import CHAT_HEADERS
from deployments.ingress.http.api import Access, Handler, Operation, build_schema
from deployments.ingress.http.bodies import json_response
from deployments.ingress.request_options import RequestOptions
from deployments.registry import RegisteredModel

EXAMPLE = {
    "instructions": "Answer in one sentence.",
    "input": "What is a river?",
    "max_output_tokens": 40,
}


HttpMethod = Literal["GET", "POST", "DELETE"]
# Paths of stored responses, with their methods. This server stores none.
STORED = "/v1/responses/{response_id}"
STORED_OPERATIONS: tuple[tuple[HttpMethod, str], ...] = (
    ("GET", STORED),
    ("DELETE", STORED),
    ("POST", f"{STORED}/cancel"),
    ("GET", f"{STORED}/input_items"),
)


class ResponseNotStored(ServeError):
    """The request names an earlier response. This server stores none."""

    status, code = 404, "response_not_found"


class CompactionUnsupported(ServeError):
    """The request asks for a compaction of its items."""

    status, code = 404, "compaction_unsupported"


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


def build_missing_operation(method: HttpMethod, path: str, handler: Handler) -> Operation:
    """Build an operation of OpenAI's API that this server answers with advice only."""
    return Operation(
        method=method,
        paths=(path, f"/models/{{id:path}}{path}"),
        handler=handler,
        summary="Always an error",
        access=Access.INFER,
        hidden=True,
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
            build_generation_operation(
                paths=("/v1/responses/input_tokens", "/models/{id:path}/v1/responses/input_tokens"),
                handler=self.count_input_tokens,
                summary="The number of tokens of a conversation",
                headers={},
                body=build_schema(ResponsesBody),
                response=build_schema(InputTokenCount),
                examples={"a question": EXAMPLE},
            ),
            # Not as `/v1/responses/compact`: errors of unknown paths would propose it.
            build_missing_operation("POST", STORED, self.compact),
            *(
                build_missing_operation(method, path, self.find_stored)
                for method, path in STORED_OPERATIONS
            ),
        )

    async def respond(self, request: Request) -> Response:
        return await answer_generation(self._pipeline, request, ResponsesBody, parse, for_chat=True)

    async def count_input_tokens(self, request: Request) -> Response:
        chat = await tokenize_chat(self._pipeline, request, ResponsesBody, parse)
        return json_response(
            InputTokenCount(object="response.input_tokens", input_tokens=len(chat.ids))
        )

    async def compact(self, request: Request) -> Response:
        if request.path_params["response_id"] != "compact":
            return await self.find_stored(request)
        raise CompactionUnsupported(
            "this server does not compact conversations; leave the oldest items out of `input`, or "
            "ask a model to summarize them with `/v1/responses`"
        )

    async def find_stored(self, request: Request) -> Response:
        raise ResponseNotStored(
            "this server stores no responses; wait for each response, and send the whole "
            "conversation in `input` of the next request"
        )
