"""Routes of text-generation-inference's API.

POST /generate                    one object
POST /generate_stream             an event per token
POST /models/{id}/generate  ...   the same for one model

For decoder-only models, the Hugging Face routes use the same format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.text_generation.handler import TextGenerationHandler
from deployments.ingress.apis.text_generation.requests import (
    PROMPT,
    PROMPTS,
    RouteDefaults,
)
from deployments.ingress.apis.text_generation.responses import (
    TGI_ERROR_FORMAT,
    TGI_HEADERS,
)
from deployments.ingress.apis.text_generation.schemas import (
    Generated,
    GenerateParameters,
    TgiErrorEvent,
    TokenEvent,
)
from deployments.ingress.http.api import Access, Handler, Operation, build_schema
from deployments.ingress.request_options import RequestOptions
from deployments.tasks.inputs import Inputs, JsonSchema

EXAMPLES: Mapping[str, Any] = {
    "greedy": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}},
    "sampled": {
        "inputs": "Once upon a time",
        "parameters": {"max_new_tokens": 8, "temperature": 0.7, "seed": 7, "details": True},
    },
}
# Example and response type for the OpenAPI document of the Hugging Face routes.
ENVELOPE_EXAMPLE: Mapping[str, Any] = {**EXAMPLES["greedy"], "stream": False}
ENVELOPE_RESPONSE = list[Generated] | list[list[Generated]]
EVENT_SCHEMA = build_schema(TokenEvent | TgiErrorEvent)


class TextGenerationRoutes:
    """The routes of this API."""

    name: ClassVar = "text-generation-inference"
    error_format: ClassVar = TGI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._handler = TextGenerationHandler(context)

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        return (
            _generate_operation(
                "generate", self.generate, "Generate text", response=build_schema(Generated)
            ),
            _generate_operation(
                "generate_stream",
                self.generate_stream,
                "Generate text as a stream of tokens",
                events=EVENT_SCHEMA,
            ),
        )

    async def generate(self, request: Request) -> Response:
        """Return one object. `stream` in the body is ignored."""
        return await self._handler.respond(request, RouteDefaults())

    async def generate_stream(self, request: Request) -> Response:
        return await self._handler.respond(request, RouteDefaults(streams=True))


def body_schema(inputs: Inputs[Any], *, envelope: bool) -> JsonSchema:
    flag: JsonSchema = {"type": "boolean", "description": "Respond with an event per token."}
    return {
        "title": "text-generation",
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": inputs.schema(),
            "parameters": build_schema(GenerateParameters),
            "options": build_schema(RequestOptions),
            **({"stream": flag} if envelope else {}),
        },
    }


def envelope_body_schema() -> JsonSchema:
    """Return the schema of a body on the Hugging Face routes."""
    return body_schema(PROMPTS, envelope=True)


def _generate_operation(
    name: str,
    handler: Handler,
    summary: str,
    *,
    response: JsonSchema | None = None,
    events: JsonSchema | None = None,
) -> Operation:
    return Operation(
        method="POST",
        paths=(f"/{name}", f"/models/{{id:path}}/{name}"),
        handler=handler,
        summary=summary,
        access=Access.INFER,
        body=body_schema(PROMPT, envelope=False),
        response=response,
        events=events,
        examples=EXAMPLES,
        runs_model=True,
        headers=TGI_HEADERS,
    )
