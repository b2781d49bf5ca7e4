"""Routes of Anthropic's Messages API.

POST /v1/messages  /models/{id}/v1/messages
POST /v1/messages/count_tokens  /models/{id}/v1/messages/count_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.apis.anthropic.errors import ANTHROPIC_ERROR_FORMAT
from deployments.ingress.apis.anthropic.requests import parse_messages
from deployments.ingress.apis.anthropic.responses import build_message_response
from deployments.ingress.apis.anthropic.schemas import (
    AnthropicMessage,
    Event,
    MessagesBody,
    PromptBody,
    TokenCount,
)
from deployments.ingress.apis.anthropic.streaming import encode_error, encode_message_stream
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.generation_answers import (
    ParsedGeneration,
    answer_generation,
    tokenize_chat,
)
from deployments.ingress.apis.shared.response_headers import CHAT_HEADERS
from deployments.ingress.http.api import Access, Operation, build_schema
from deployments.ingress.http.bodies import json_response
from deployments.ingress.request_options import RequestOptions
from deployments.registry import RegisteredModel

EXAMPLE = {
    "system": "Answer in one sentence.",
    "messages": [{"role": "user", "content": "What is a river?"}],
}


class AnthropicRoutes:
    """Handlers of Anthropic's API."""

    name: ClassVar = "Anthropic"
    error_format: ClassVar = ANTHROPIC_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                paths=("/v1/messages", "/models/{id:path}/v1/messages"),
                handler=self.messages,
                summary="The next message of a conversation, as content blocks",
                access=Access.INFER,
                body=build_schema(MessagesBody),
                response=build_schema(AnthropicMessage),
                events=build_schema(Event),
                examples={"a question": {**EXAMPLE, "max_tokens": 40}},
                runs_model=True,
                headers=CHAT_HEADERS,
            ),
            Operation(
                method="POST",
                paths=("/v1/messages/count_tokens", "/models/{id:path}/v1/messages/count_tokens"),
                handler=self.count_tokens,
                summary="The number of tokens of a conversation",
                access=Access.INFER,
                body=build_schema(PromptBody),
                response=build_schema(TokenCount),
                examples={"a question": EXAMPLE},
                runs_model=True,
            ),
        )

    async def messages(self, request: Request) -> Response:
        return await answer_generation(
            self._pipeline, request, MessagesBody, parse_message_body, for_chat=True
        )

    async def count_tokens(self, request: Request) -> Response:
        chat = await tokenize_chat(self._pipeline, request, PromptBody, parse_message_body)
        return json_response(TokenCount(input_tokens=len(chat.ids)))


def parse_message_body(
    body: PromptBody, model: RegisteredModel, options: RequestOptions
) -> ParsedGeneration:
    parsed = parse_messages(body, model, options)
    return ParsedGeneration(
        request=parsed.request,
        field_names=parsed.field_names,
        build=lambda response: build_message_response(response, parsed.chat),
        encode=lambda stream: encode_message_stream(stream, parsed.chat),
        encode_error=encode_error,
    )
