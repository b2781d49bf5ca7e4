"""Summarization, translation and text2text-generation, asked through the Hugging Face routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.families.huggingface_bodies import wants_stream
from deployments.ingress.families.text2text.answers import told_answers
from deployments.ingress.families.text2text.messages import (
    NESTED,
    TextToTextAnswer,
    TextToTextParameters,
)
from deployments.ingress.families.text2text.questions import TextToText, task_for
from deployments.ingress.families.text_generation.headers import answer_headers
from deployments.ingress.families.text_generation.questions import NAMES, PROMPTS
from deployments.ingress.families.text_generation.routes import TextGenerationRoutes, body_schema
from deployments.ingress.families.text_generation.time_limits import over_at
from deployments.ingress.generation import (
    GenerationQuestion,
    GenerationReply,
    GenerationService,
)
from deployments.ingress.http.api import errors_told_by, schema_of
from deployments.ingress.http.codec import json_response
from deployments.ingress.http.options import read_options
from deployments.ingress.http.wording import fields_called
from deployments.manifest import TEXT2TEXT_TASKS, TaskName
from deployments.registry import OpenModel
from deployments.tasks.inputs import JsonSchema

# What the Hugging Face routes document of these tasks.
ANSWER = list[TextToTextAnswer] | list[list[TextToTextAnswer]]
EXAMPLE: Mapping[str, Any] = {"inputs": ["The food was good."]}


class TextToTextAnswers:
    """Answers for the Hugging Face routes. Streams are text generation's."""

    def __init__(self, writing: TextGenerationRoutes, generation: GenerationService) -> None:
        self._writing = writing
        self._generation = generation

    async def answer_envelope(
        self, request: Request, body: Mapping[str, Any], model: OpenModel, named: TaskName | None
    ) -> Response:
        """A list of answers, or events. `named` is the task in the path.

        huggingface_hub's `text_generation` sends what its `summarization` does, to the same path:
        where that names no task, its answer has both their keys.
        """
        task = task_for(model, named)
        streams = wants_stream(body)
        if streams:
            errors_told_by(request, self._writing)
        question = TextToText.read(body, model, task, streams=streams)
        wanted = question.question(read_options(body.get("options"), request.headers))
        if streams:
            return await self._writing.streamed(question.asked, wanted)
        if wanted.options.beams is not None:
            reply = await self._searched(question, wanted)
        else:
            reply = await self._writing.complete(question.asked, wanted)
        is_hub = "hf_hub/" in request.headers.get("user-agent", "")
        return json_response(
            told_answers(reply, question, both=is_hub and named is None),
            headers=answer_headers(reply, question.asked),
        )

    async def _searched(self, question: TextToText, wanted: GenerationQuestion) -> GenerationReply:
        """What beam search finds; before it is done it has nothing to tell.

        Raises DeadlineExceeded where `max_time` is over before, and other ServeErrors.
        """
        max_time_s = question.parameters.max_time
        ends_s = None if max_time_s is None else asyncio.get_running_loop().time() + max_time_s
        async with over_at(
            ends_s,
            "before beam search was done; without beams, by `num_beams` 1, what is there by then "
            "is the answer",
        ):
            with fields_called(NAMES):
                return await self._generation.complete(wanted)


def text_to_text_schemas() -> list[JsonSchema]:
    """A body for each task."""
    schema = body_schema(PROMPTS, envelope=True)
    parameters = schema_of(TextToTextParameters)
    nested = {"type": "object", "description": "Of these parameters, any that are for `generate`."}
    parameters["properties"] |= dict.fromkeys(NESTED, nested)
    return [
        {
            **schema,
            "title": task.value,
            "properties": {**schema["properties"], "parameters": parameters},
        }
        for task in TEXT2TEXT_TASKS
    ]
