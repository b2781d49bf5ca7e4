"""Answers to requests for text generation, on the routes of this API and of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.deadlines import deadline_after
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.envelope import parse_stream_flag
from deployments.ingress.apis.text_generation.requests import (
    TGI_FIELD_NAMES,
    GenerateRequest,
    RouteDefaults,
    parse_generate_request,
)
from deployments.ingress.apis.text_generation.responses import (
    TGI_ERROR_FORMAT,
    build_generate_responses,
    tgi_response_headers,
    tgi_stream_headers,
)
from deployments.ingress.apis.text_generation.streaming import (
    complete_before,
    encode_error_event,
    encode_events,
    read_batches_until,
    start_stream_before,
)
from deployments.ingress.http.api import use_error_format
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_fields import read_model_name, read_options
from deployments.ingress.http.sse import SseResponse, start_stream
from deployments.ingress.requests import GenerationRequest, GenerationResponse
from deployments.registry import RegisteredModel


class TextGenerationHandler:
    """Handler that parses bodies for text generation and answers them.

    Other packages call `complete` and `stream` for bodies of their own.
    """

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    async def respond(self, request: Request, defaults: RouteDefaults) -> Response:
        """Respond to a body of this API."""
        body = await read_json_object(request, self._pipeline.settings.limits)
        return await self._handle(request, body, defaults)

    async def handle_envelope(
        self, request: Request, body: Mapping[str, Any], model: RegisteredModel
    ) -> Response:
        """Respond to a body of the Hugging Face routes, with the error format of this API.

        The response is a list, a list of lists for a list of prompts, or a stream.
        """
        use_error_format(request, TGI_ERROR_FORMAT)
        defaults = RouteDefaults(full_text=True, many=True, streams=parse_stream_flag(body))
        return await self._handle(request, body, defaults, model)

    async def _handle(
        self,
        request: Request,
        body: Mapping[str, Any],
        defaults: RouteDefaults,
        model: RegisteredModel | None = None,
    ) -> Response:
        tgi_request = parse_generate_request(body, defaults)
        options = read_options(body.get("options"), request.headers)
        model_id = read_model_name(request, body.get("model"))
        if model is not None:
            model = await self._pipeline.settle_generator(model_id, model, options)
        generation_request = tgi_request.to_generation_request(
            options, model=model, model_id=model_id
        )
        if tgi_request.streams:
            return await self.stream(tgi_request, generation_request)
        response = await self.complete(tgi_request, generation_request)
        content: Any = build_generate_responses(response, tgi_request)
        if not tgi_request.is_list:
            content = content[0] if defaults.many else content[0][0]
        return json_response(content, headers=tgi_response_headers(response, tgi_request))

    async def complete(
        self, tgi_request: GenerateRequest, generation_request: GenerationRequest
    ) -> GenerationResponse:
        """Generate the whole response. `max_time`, if set, ends unfinished texts.

        Raises ServeError.
        """
        max_time_s = tgi_request.parameters.max_time
        with rename_error_fields(TGI_FIELD_NAMES):
            if max_time_s is None:
                return await self._pipeline.complete(generation_request)
            return await complete_before(self._pipeline, generation_request, max_time_s)

    async def stream(
        self, tgi_request: GenerateRequest, generation_request: GenerationRequest
    ) -> Response:
        """Start a stream. Raises ServeError for a failure before the response starts."""
        write_timeout_s = self._pipeline.settings.stream_write_timeout_s
        return await start_stream(
            self._start(tgi_request, generation_request, write_timeout_s),
            encode_error_event,
            stream_write_timeout_s=write_timeout_s,
        )

    async def _start(
        self,
        tgi_request: GenerateRequest,
        generation_request: GenerationRequest,
        stream_write_timeout_s: float,
    ) -> SseResponse:
        max_time_s = tgi_request.parameters.max_time
        with rename_error_fields(TGI_FIELD_NAMES):
            if max_time_s is None:
                stream = await self._pipeline.stream(generation_request)
                batches = stream.batches()
            else:
                deadline_s = deadline_after(max_time_s)
                stream = await start_stream_before(self._pipeline, generation_request, deadline_s)
                batches = read_batches_until(stream, deadline_s)
        return SseResponse(
            encode_events(batches, stream.started[0], tgi_request),
            stream,
            encode_error_event,
            stream_write_timeout_s=stream_write_timeout_s,
            headers=tgi_stream_headers(stream, tgi_request),
        )
