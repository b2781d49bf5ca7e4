"""The API of text-generation-inference, over several models.

POST /generate                    one object
POST /generate_stream             an event for each token
POST /models/{id}/generate  ...   the same of one model

The Hugging Face routes answer in this dialect too when a model that generates text is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.apis.huggingface.requests import parse_stream_flag
from deployments.ingress.apis.text_generation.requests import (
    PROMPT,
    PROMPTS,
    TGI_FIELD_NAMES,
    GenerateRequest,
    RouteDefaults,
    parse_generate_request,
)
from deployments.ingress.apis.text_generation.responses import (
    TGI_HEADERS,
    build_generate_responses,
    build_tgi_response,
    tgi_response_headers,
    tgi_stream_headers,
)
from deployments.ingress.apis.text_generation.schemas import (
    Generated,
    GenerateParameters,
    TgiErrorEvent,
    TokenEvent,
)
from deployments.ingress.apis.text_generation.streaming import (
    complete_before,
    error_event,
    events_of,
    read_batches_until,
    start_stream_before,
)
from deployments.ingress.generation import (
    GenerationRequest,
    GenerationResponse,
    GenerationService,
)
from deployments.ingress.http.api import Handler, Operation, schema_of, use_error_format
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_options import (
    RequestOptions,
    model_in_body,
    model_in_path,
    read_options,
)
from deployments.ingress.http.sse import SseResponse
from deployments.ingress.service import InferenceService
from deployments.tasks.inputs import Inputs, JsonSchema

EXAMPLES: Mapping[str, Any] = {
    "greedy": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}},
    "drawn": {
        "inputs": "Once upon a time",
        "parameters": {"max_new_tokens": 8, "temperature": 0.7, "seed": 7, "details": True},
    },
}
# What the Hugging Face routes document of the dialect.
ENVELOPE_EXAMPLE: Mapping[str, Any] = {**EXAMPLES["greedy"], "stream": False}
ENVELOPE_RESPONSE = list[Generated] | list[list[Generated]]
EVENT_SCHEMA = schema_of(TokenEvent | TgiErrorEvent)


class TextGenerationRoutes:
    """Handlers of the family."""

    name: ClassVar = "text-generation-inference"

    def __init__(self, service: InferenceService, generation: GenerationService) -> None:
        self._service = service
        self._generation = generation

    def operations(self) -> Sequence[Operation]:
        """The per-model forms must stand before the Hugging Face family's greedy path."""
        return (
            _generate_operation(
                "generate", self.generate, "Generate text", response=schema_of(Generated)
            ),
            _generate_operation(
                "generate_stream",
                self.generate_stream,
                "Generate text, told by token",
                events=EVENT_SCHEMA,
            ),
        )

    def owns(self, path: str) -> bool:
        """The routes above."""
        parts = path.strip("/").split("/")
        own = parts[-1] in ("generate", "generate_stream")
        return own and (len(parts) == 1 or parts[0] == "models")

    async def generate(self, request: Request) -> Response:
        """One object; a `stream` in the body means nothing here."""
        return await self._answer_own(request, RouteDefaults())

    async def generate_stream(self, request: Request) -> Response:
        """Events."""
        return await self._answer_own(request, RouteDefaults(streams=True))

    async def _answer_own(self, request: Request, defaults: RouteDefaults) -> Response:
        body = await read_json_object(request, self._service.settings.limits)
        model_id = model_in_path(request) or model_in_body(body.get("model"))
        return await self._answer(request, body, model_id, defaults)

    async def handle_envelope(
        self, request: Request, body: Mapping[str, Any], model_id: str | None
    ) -> Response:
        """A Hugging Face body: a list of answers, a list of these for several prompts, or events.

        Errors are told in this family's words from here on.
        """
        use_error_format(request, self)
        defaults = RouteDefaults(full_text=True, many=True, streams=parse_stream_flag(body))
        return await self._answer(request, body, model_id, defaults)

    async def _answer(
        self,
        request: Request,
        body: Mapping[str, Any],
        model_id: str | None,
        defaults: RouteDefaults,
    ) -> Response:
        asked = parse_generate_request(body, defaults)
        question = asked.question(model_id, read_options(body.get("options"), request.headers))
        if asked.streams:
            return await self.streamed(asked, question)
        reply = await self.complete(asked, question)
        answers: Any = build_generate_responses(reply, asked)
        if not asked.listed:
            answers = answers[0] if defaults.many else answers[0][0]
        return json_response(answers, headers=tgi_response_headers(reply, asked))

    async def complete(
        self, asked: GenerateRequest, question: GenerationRequest
    ) -> GenerationResponse:
        """The answers, within `max_time` where there is one. Raises ServeError."""
        max_time_s = asked.parameters.max_time
        with rename_error_fields(TGI_FIELD_NAMES):
            if max_time_s is None:
                return await self._generation.complete(question)
            return await complete_before(self._generation, question, max_time_s)

    async def streamed(self, asked: GenerateRequest, question: GenerationRequest) -> Response:
        """Events. Raises ServeError for what fails before the first."""
        max_time_s = asked.parameters.max_time
        with rename_error_fields(TGI_FIELD_NAMES):
            if max_time_s is None:
                stream = await self._generation.stream(question)
                batches = stream.batches()
            else:
                ends_s = asyncio.get_running_loop().time() + max_time_s
                stream = await start_stream_before(self._generation, question, ends_s)
                batches = read_batches_until(stream, ends_s)
        return SseResponse(
            events_of(batches, stream.started[0], asked),
            stream,
            error_event,
            stream_write_timeout_s=self._service.settings.stream_write_timeout_s,
            headers=tgi_stream_headers(stream, asked),
        )

    def error_response(self, error: ServeError) -> Response:
        """text-generation-inference's statuses and words."""
        return build_tgi_response(error)


def body_schema(inputs: Inputs[Any], *, envelope: bool) -> JsonSchema:
    """The whole body of a request."""
    flag: JsonSchema = {"type": "boolean", "description": "Answer with an event for each token."}
    return {
        "title": "text-generation",
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": inputs.schema(),
            "parameters": schema_of(GenerateParameters),
            "options": schema_of(RequestOptions),
            **({"stream": flag} if envelope else {}),
        },
    }


def envelope_body_schema() -> JsonSchema:
    """A body that the Hugging Face routes take."""
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
        body=body_schema(PROMPT, envelope=False),
        response=response,
        events=events,
        examples=EXAMPLES,
        runs_model=True,
        headers=TGI_HEADERS,
    )
