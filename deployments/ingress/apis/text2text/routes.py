"""Responses of encoder-decoder models on the Hugging Face routes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TEXT2TEXT_TASKS, TaskName
from deployments.deadlines import deadline_after
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.envelope import parse_stream_flag
from deployments.ingress.apis.text2text.requests import TextToTextRequest, resolve_generation_task
from deployments.ingress.apis.text2text.schemas import (
    NESTED_KEYS,
    TEXT_KEYS,
    TextToTextAnswer,
    TextToTextParameters,
)
from deployments.ingress.apis.text_generation.handler import TextGenerationHandler
from deployments.ingress.apis.text_generation.requests import PROMPTS, TGI_FIELD_NAMES
from deployments.ingress.apis.text_generation.responses import (
    TGI_ERROR_FORMAT,
    build_generate_responses,
    tgi_response_headers,
)
from deployments.ingress.apis.text_generation.routes import body_schema
from deployments.ingress.apis.text_generation.schemas import Generated
from deployments.ingress.apis.text_generation.streaming import enforce_max_time
from deployments.ingress.http.api import build_schema, use_error_format
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_fields import read_model_name, read_options
from deployments.ingress.requests import GenerationRequest, GenerationResponse
from deployments.registry import RegisteredModel
from deployments.tasks.inputs import JsonSchema

# Strings from which `clean_up_tokenization_spaces` removes spaces, in the order of transformers.
SPACED_MARKS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# Names in the user agents of huggingface_hub and huggingface.js.
HUB_CLIENTS = ("hf_hub/", "@huggingface/inference/")


def build_text2text_response(
    response: GenerationResponse, request: TextToTextRequest, tasks: Sequence[str]
) -> list[Any]:
    """Return a list of objects, one per sequence.

    If the request has a list of texts and several sequences per text, return a list of lists, one
    list per text. Each object has its text under the keys of `tasks`.
    """
    objects = [
        [_build_object(generated, request, tasks) for generated in sequences]
        for sequences in build_generate_responses(response, request.tgi_request)
    ]
    if not request.tgi_request.is_list:
        return objects[0]
    if request.parameters.has_sequences:
        return objects
    return [sequence for (sequence,) in objects]


def _build_object(
    generated: Generated, request: TextToTextRequest, tasks: Sequence[str]
) -> dict[str, Any]:
    text = generated["generated_text"]
    if request.parameters.clean_up_tokenization_spaces:
        text = clean_up_spaces(text)
    built: dict[str, Any] = {TEXT_KEYS[task]: text for task in tasks}
    if "details" in generated:
        built |= {"generated_text": text, "details": generated["details"]}
    return built


def clean_up_spaces(text: str) -> str:
    """Remove spaces before punctuation and within contractions."""
    for mark in SPACED_MARKS:
        text = text.replace(mark, mark.strip())
    return text


# Response type and example for the OpenAPI document of the Hugging Face routes.
TEXT2TEXT_RESPONSE = list[TextToTextAnswer] | list[list[TextToTextAnswer]]
TEXT2TEXT_EXAMPLE: Mapping[str, Any] = {"inputs": ["The food was good."]}


class TextToTextHandler:
    """Handler of the Hugging Face routes for encoder-decoder models.

    Streams have the format of text generation.
    """

    def __init__(self, text_generation: TextGenerationHandler, context: ApiContext) -> None:
        self._text_generation = text_generation
        self._pipeline = context.pipeline

    async def handle_envelope(
        self,
        request: Request,
        body: Mapping[str, Any],
        model: RegisteredModel,
        path_task: str | None,
    ) -> Response:
        """Respond with a list or a stream.

        The methods `text_generation`, `summarization` and `translation` of HUB_CLIENTS send the
        same body to the same path. If the path has no task, the response to these clients
        therefore has the keys of all tasks of the model, and the key of `text_generation`.
        """
        task = resolve_generation_task(model, path_task)
        streams = parse_stream_flag(body)
        if streams:
            use_error_format(request, TGI_ERROR_FORMAT)
        options = read_options(body.get("options"), request.headers)
        model_id = read_model_name(request, body.get("model"))
        model = await self._pipeline.settle_generator(model_id, model, options)
        parsed = TextToTextRequest.parse(body, model, task, streams=streams)
        generation_request = parsed.to_generation_request(options, model_id=model_id)
        if streams:
            return await self._text_generation.stream(parsed.tgi_request, generation_request)
        if generation_request.options.beam_search is not None:
            response = await self._search_beams(parsed, generation_request)
        else:
            response = await self._text_generation.complete(parsed.tgi_request, generation_request)
        agent = request.headers.get("user-agent", "")
        tasks: tuple[str, ...] = (task,)
        if path_task is None and any(name in agent for name in HUB_CLIENTS):
            tasks = (*model.tasks, TaskName.TEXT2TEXT_GENERATION)
        return json_response(
            build_text2text_response(response, parsed, tasks),
            headers=tgi_response_headers(response, parsed.tgi_request),
        )

    async def _search_beams(
        self, parsed: TextToTextRequest, generation_request: GenerationRequest
    ) -> GenerationResponse:
        """Generate by beam search.

        Raises DeadlineExceeded after `max_time`, because beam search has no partial result.
        """
        max_time_s = parsed.parameters.max_time
        deadline_s = math.inf if max_time_s is None else deadline_after(max_time_s)
        async with enforce_max_time(
            deadline_s,
            "before beam search finished. Set `num_beams` to 1 to get the tokens generated by then",
        ):
            with rename_error_fields(TGI_FIELD_NAMES):
                return await self._pipeline.complete(generation_request)


def text2text_body_schemas() -> list[JsonSchema]:
    """Return one body schema per task."""
    schema = body_schema(PROMPTS, envelope=True)
    parameters = build_schema(TextToTextParameters)
    nested = {"type": "object", "description": "The same parameters, for `generate`."}
    properties = {**parameters["properties"], **dict.fromkeys(NESTED_KEYS, nested)}
    return [
        {
            **schema,
            "title": str(task),
            "properties": {
                **schema["properties"],
                "parameters": {**parameters, "properties": properties},
            },
        }
        for task in TEXT2TEXT_TASKS
    ]
