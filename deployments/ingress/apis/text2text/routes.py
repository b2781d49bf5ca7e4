"""Summarization, translation and text2text-generation, asked through the Hugging Face routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TEXT2TEXT_TASKS, TaskName
from deployments.ingress.apis.huggingface.requests import parse_stream_flag
from deployments.ingress.apis.text2text.requests import TextToTextRequest, resolve_generation_task
from deployments.ingress.apis.text2text.schemas import (
    NESTED_KEYS,
    TEXT_KEYS,
    TextToTextAnswer,
    TextToTextParameters,
)
from deployments.ingress.apis.text_generation.requests import PROMPTS, TGI_FIELD_NAMES
from deployments.ingress.apis.text_generation.responses import (
    build_generate_responses,
    tgi_response_headers,
)
from deployments.ingress.apis.text_generation.routes import TextGenerationRoutes, body_schema
from deployments.ingress.apis.text_generation.schemas import Generated
from deployments.ingress.apis.text_generation.streaming import cancel_at
from deployments.ingress.generation import (
    GenerationRequest,
    GenerationResponse,
    GenerationService,
)
from deployments.ingress.http.api import schema_of, use_error_format
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_options import read_options
from deployments.registry import RegisteredModel
from deployments.tasks.inputs import JsonSchema

# Spaces that tokenizers of words leave, in the order in which transformers takes them out.
SPACED_MARKS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
PLAIN_KEY = "generated_text"


def build_text2text_response(
    reply: GenerationResponse, question: TextToTextRequest, *, both: bool
) -> list[Any]:
    """An answer for each text; a list of them for each where several texts have several.

    With `both` the text also has the name that it has in text generation.
    """
    told = [
        [_told(one, question, both=both) for one in answers]
        for answers in build_generate_responses(reply, question.asked)
    ]
    if not question.asked.listed:
        return told[0]
    if (question.parameters.num_return_sequences or 1) > 1:
        return told
    return [answer for (answer,) in told]


def _told(answer: Generated, question: TextToTextRequest, *, both: bool) -> dict[str, Any]:
    text = answer["generated_text"]
    if question.parameters.clean_up_tokenization_spaces:
        text = clean_up_spaces(text)
    told: dict[str, Any] = {TEXT_KEYS[question.task]: text}
    if both or "details" in answer:
        told[PLAIN_KEY] = text
    if "details" in answer:
        told["details"] = answer["details"]
    return told


def clean_up_spaces(text: str) -> str:
    """`text` without the spaces that stand before punctuation and within contractions."""
    for loose in SPACED_MARKS:
        text = text.replace(loose, loose.strip())
    return text


# What the Hugging Face routes document of these tasks.
TEXT2TEXT_RESPONSE = list[TextToTextAnswer] | list[list[TextToTextAnswer]]
TEXT2TEXT_EXAMPLE: Mapping[str, Any] = {"inputs": ["The food was good."]}


class TextToTextHandler:
    """Answers for the Hugging Face routes. Streams are text generation's."""

    def __init__(self, writing: TextGenerationRoutes, generation: GenerationService) -> None:
        self._writing = writing
        self._generation = generation

    async def handle_envelope(
        self,
        request: Request,
        body: Mapping[str, Any],
        model: RegisteredModel,
        named: TaskName | None,
    ) -> Response:
        """A list of answers, or events. `named` is the task in the path.

        huggingface_hub's `text_generation` sends what its `summarization` does, to the same path:
        where that names no task, its answer has both their keys.
        """
        task = resolve_generation_task(model, named)
        streams = parse_stream_flag(body)
        if streams:
            use_error_format(request, self._writing)
        question = TextToTextRequest.read(body, model, task, streams=streams)
        wanted = question.question(read_options(body.get("options"), request.headers))
        if streams:
            return await self._writing.streamed(question.asked, wanted)
        if wanted.options.beam_search is not None:
            reply = await self._searched(question, wanted)
        else:
            reply = await self._writing.complete(question.asked, wanted)
        is_hub = "hf_hub/" in request.headers.get("user-agent", "")
        return json_response(
            build_text2text_response(reply, question, both=is_hub and named is None),
            headers=tgi_response_headers(reply, question.asked),
        )

    async def _searched(
        self, question: TextToTextRequest, wanted: GenerationRequest
    ) -> GenerationResponse:
        """What beam search finds; before it is done it has nothing to tell.

        Raises DeadlineExceeded where `max_time` is over before, and other ServeErrors.
        """
        max_time_s = question.parameters.max_time
        ends_s = None if max_time_s is None else asyncio.get_running_loop().time() + max_time_s
        async with cancel_at(
            ends_s,
            "before beam search was done; without beams, by `num_beams` 1, what is there by then "
            "is the answer",
        ):
            with rename_error_fields(TGI_FIELD_NAMES):
                return await self._generation.complete(wanted)


def text2text_body_schemas() -> list[JsonSchema]:
    """A body for each task."""
    schema = body_schema(PROMPTS, envelope=True)
    parameters = schema_of(TextToTextParameters)
    nested = {"type": "object", "description": "Of these parameters, any that are for `generate`."}
    parameters["properties"] |= dict.fromkeys(NESTED_KEYS, nested)
    return [
        {
            **schema,
            "title": task.value,
            "properties": {**schema["properties"], "parameters": parameters},
        }
        for task in TEXT2TEXT_TASKS
    ]
