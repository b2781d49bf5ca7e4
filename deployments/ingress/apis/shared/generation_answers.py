"""Answers to generation requests, whole or as a stream, the same for every chat dialect.

A dialect is an API with its own bodies, responses and events, such as OpenAI's chat completions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.apis.shared.response_headers import generation_headers, stream_headers
from deployments.ingress.generation_stream import GenerationStream
from deployments.ingress.http.api import LENIENT, parse_body
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields, rename_field
from deployments.ingress.http.request_fields import RawOptions, read_model_name, read_options
from deployments.ingress.http.sse import SseResponse, start_stream
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import GenerationRequest, GenerationResponse
from deployments.registry import RegisteredModel


class StreamableBody(BaseModel):
    """Fields that the bodies of all dialects have. Unknown keys are ignored."""

    model_config = LENIENT

    model: str | None = None
    stream: bool | None = None
    options: RawOptions = None


_DialectBody = TypeVar("_DialectBody", bound=StreamableBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedGeneration:
    """A parsed body: the generation request, and how the dialect answers it."""

    request: GenerationRequest
    field_names: Mapping[str, str]  # names of the request's fields in the body, for errors
    build: Callable[[GenerationResponse], Any]  # the JSON of a whole response
    encode: Callable[[GenerationStream], AsyncGenerator[bytes, None]]  # the events of a stream
    encode_error: Callable[[ServeError], bytes]  # the last events of a failed stream


class TokenizedChat(NamedTuple):
    ids: tuple[int, ...]
    model: RegisteredModel


ParseGeneration = Callable[[_DialectBody, RegisteredModel, RequestOptions], ParsedGeneration]


async def answer_generation(
    pipeline: RequestPipeline,
    request: Request,
    body_type: type[_DialectBody],
    parse: ParseGeneration[_DialectBody],
    *,
    for_chat: bool = False,
) -> Response:
    """Answer with events if the body asks for a stream, else with a whole response.

    Raises ServeError.
    """
    body, parsed = await _parse(pipeline, request, body_type, parse, for_chat=for_chat)
    if body.stream:
        return await _stream(pipeline, parsed)
    with rename_error_fields(parsed.field_names):
        response = await pipeline.complete(parsed.request)
    return json_response(parsed.build(response), headers=generation_headers(response))


async def tokenize_chat(
    pipeline: RequestPipeline,
    request: Request,
    body_type: type[_DialectBody],
    parse: ParseGeneration[_DialectBody],
) -> TokenizedChat:
    """Render a conversation and tokenize it. Raises ServeError."""
    _, parsed = await _parse(pipeline, request, body_type, parse, for_chat=True)
    model = parsed.request.model
    assert model is not None, "bug: dialects parse for a model"
    with rename_error_fields(parsed.field_names):
        return TokenizedChat(await pipeline.tokenize_prompt(parsed.request), model)


async def _parse(
    pipeline: RequestPipeline,
    request: Request,
    body_type: type[_DialectBody],
    parse: ParseGeneration[_DialectBody],
    *,
    for_chat: bool,
) -> tuple[_DialectBody, ParsedGeneration]:
    """Return the body, and what `parse` makes of it. Raises ServeError.

    An error about the model takes precedence over an error of the validation.
    """
    raw = await read_json_object(request, pipeline.settings.limits)
    model_id = read_model_name(request, raw.get("model"))
    model = pipeline.resolver.find_generator(model_id, for_chat=for_chat)
    body = parse_body(body_type, raw)
    options = read_options(body.options, request.headers, streams=bool(body.stream))
    model = await pipeline.settle_generator(model_id, model, options)
    parsed = parse(body, model, options)
    return body, replace(parsed, request=replace(parsed.request, model_id=model_id))


async def _stream(pipeline: RequestPipeline, parsed: ParsedGeneration) -> Response:
    write_timeout_s = pipeline.settings.stream_write_timeout_s

    def encode_error(error: ServeError) -> bytes:
        return parsed.encode_error(rename_field(error, parsed.field_names))

    async def start() -> SseResponse:
        with rename_error_fields(parsed.field_names):
            stream = await pipeline.stream(parsed.request)
        return SseResponse(
            parsed.encode(stream),
            stream,
            encode_error,
            stream_write_timeout_s=write_timeout_s,
            headers=stream_headers(stream),
        )

    return await start_stream(start(), encode_error, stream_write_timeout_s=write_timeout_s)
