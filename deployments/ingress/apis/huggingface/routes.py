"""The Hugging Face Inference API: task routes, one model per path.

POST /  /v1  /invocations               the body's `model`, else the default one
POST /models/{id}                       the model's own task, or the one the body is meant for
POST /models/{id}/pipeline/{task}       a named task
POST /pipeline/{task}/{id}              the same, older form
GET  /models  /models/{id}  /models/{id}/info  /models/{id}/health  /status/{id}

Models that generate text are asked, and answer, in the dialect of `text_generation`; those with an
encoder by their tasks, such as summarization.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.types import TaskName
from deployments.errors import InvalidField, ModelLoading, ServeError
from deployments.ingress.apis.huggingface.requests import (
    merge_parameters,
    parse_envelope,
    parse_task,
    parse_task_inputs,
    parse_task_parameters,
)
from deployments.ingress.apis.model_list import (
    build_model_facts,
    build_model_status,
    build_short_path_list,
    is_loaded,
)
from deployments.ingress.apis.response_headers import REPLY_HEADERS, reply_headers, retry_headers
from deployments.ingress.apis.text2text.requests import has_encoder, resolve_generation_task
from deployments.ingress.apis.text2text.routes import (
    TEXT2TEXT_EXAMPLE,
    TEXT2TEXT_RESPONSE,
    TextToTextHandler,
    text2text_body_schemas,
)
from deployments.ingress.apis.text_generation.responses import TGI_HEADERS
from deployments.ingress.apis.text_generation.routes import (
    ENVELOPE_EXAMPLE,
    ENVELOPE_RESPONSE,
    EVENT_SCHEMA,
    TextGenerationRoutes,
    envelope_body_schema,
)
from deployments.ingress.generation import GenerationService
from deployments.ingress.http.api import Operation, schema_of
from deployments.ingress.http.bodies import json_response, read_json
from deployments.ingress.http.request_options import (
    RequestOptions,
    model_in_body,
    model_in_path,
    read_options,
)
from deployments.ingress.service import (
    InferenceRequest,
    InferenceResponse,
    InferenceService,
    detect_task,
    model_loading_error,
)
from deployments.registry import RegisteredModel
from deployments.tasks import TASKS
from deployments.tasks.inputs import JsonSchema
from deployments.tasks.text_classification import LabelScore

# huggingface_hub reads zero-shot answers as lists from 1.2 on, and as objects before.
HUB_CLIENT = re.compile(r"hf_hub/(\d{1,9})\.(\d{1,9})")
LIST_SINCE_VERSION = (1, 2)

# Every task's, and what zero-shot answers are presented as.
RESPONSE_TYPES = (
    *(task.response_type for task in TASKS.values()),
    list[LabelScore],
    ENVELOPE_RESPONSE,
    TEXT2TEXT_RESPONSE,
)
EXAMPLES: Mapping[str, Any] = {
    **{str(name): task.example for name, task in TASKS.items()},
    str(TaskName.SUMMARIZATION): TEXT2TEXT_EXAMPLE,
}


class HuggingFaceRoutes:
    """Handlers of the family."""

    name: ClassVar = "Hugging Face"

    def __init__(self, service: InferenceService, generation: GenerationService) -> None:
        self._service = service
        self._writing = TextGenerationRoutes(service, generation)
        self._rewriting = TextToTextHandler(self._writing, generation)

    def operations(self) -> Sequence[Operation]:
        """Longest suffix first: a model id may itself contain slashes."""
        return (
            self._task("Ask the default model", "/", "/v1", "/invocations"),
            self._task(
                "Ask a model for a named task",
                "/models/{id:path}/pipeline/{task}",
                "/pipeline/{task}/{id:path}",
            ),
            self._read("Every configured model, also the refused ones", "/models", self.models),
            self._read("Whether a model can answer now", "/models/{id:path}/health", self.health),
            self._read("Whether a model is loaded, and on what", "/status/{id:path}", self.status),
            self._read("One model", "/models/{id:path}/info", self.info),
            self._task("Ask a model", "/models/{id:path}", generation=ENVELOPE_EXAMPLE),
            self._read("One model", "/models/{id:path}", self.info),
        )

    def _task(self, summary: str, *paths: str, **examples: Mapping[str, Any]) -> Operation:
        return Operation(
            method="POST",
            paths=paths,
            handler=self.infer,
            summary=summary,
            body=any_body_schema(),
            response=any_response_schema(),
            examples={**EXAMPLES, **examples},
            events=EVENT_SCHEMA,
            runs_model=True,
            headers={**TGI_HEADERS, **REPLY_HEADERS},
        )

    def _read(self, summary: str, path: str, handler: Any) -> Operation:
        return Operation(
            method="GET",
            paths=(path,),
            handler=handler,
            summary=summary,
            response={"type": "object"},
        )

    def owns(self, path: str) -> bool:
        """Whatever no other family does."""
        return True

    async def infer(self, request: Request) -> Response:
        """Run a task."""
        body = parse_envelope(await read_json(request, self._service.settings.limits))
        model_id = model_in_path(request) or model_in_body(body.get("model"))
        task = parse_task(request.path_params.get("task"))
        if (writer := self._writer(body, model_id, task)) is not None:
            return await self._written(request, body, writer, task)
        reply = await self._service.infer(
            InferenceRequest(
                inputs=parse_task_inputs(body),
                model_id=model_id,
                task=task,
                parameters=parse_task_parameters(body),
                options=(options := read_options(body.get("options"), request.headers)),
            )
        )
        return json_response(
            format_for_client(reply, options, request.headers.get("user-agent", "")),
            headers=reply_headers(reply),
        )

    async def _written(
        self,
        request: Request,
        body: Mapping[str, Any],
        writer: RegisteredModel,
        task: str | None,
    ) -> Response:
        if has_encoder(writer):
            return await self._rewriting.handle_envelope(request, body, writer, task)
        return await self._writing.handle_envelope(request, body, writer.ref.id)

    def _writer(
        self, body: Mapping[str, Any], model_id: str | None, task: str | None
    ) -> RegisteredModel | None:
        """The model that generates text and is meant, if one is.

        Where no model is named, a stream of a text means the first that generates. Otherwise the
        first model of all is the default, unless a body is plainly meant for another's task.
        Raises UnknownModel or ArtifactError, or WrongTask naming what the model can do.
        """
        if model_id is not None:
            model = self._service.registry.find(model_id)
            if model.is_generative:
                resolve_generation_task(model, task)
                return model
            return None
        models = list(self._service.registry.open_models())
        writers = [model for model in models if model.is_generative]
        if task is not None or not writers:
            return None
        if body.get("stream") is True and isinstance(body.get("inputs"), str):
            return writers[0]
        inputs = body if body.get("inputs") is None else body["inputs"]
        question = InferenceRequest(inputs=inputs, parameters=merge_parameters(body))
        others = [model for model in models if not model.is_generative]
        if models[0].is_generative and not any(detect_task(question, m) for m in others):
            return models[0]
        return None

    async def models(self, request: Request) -> Response:
        """Every configured model, also the refused ones."""
        return json_response(build_short_path_list(self._service))

    async def info(self, request: Request) -> Response:
        """One model."""
        model = self._service.registry.find(model_in_path(request) or "")
        return json_response(build_model_facts(model, self._service.monitor))

    async def status(self, request: Request) -> Response:
        """What huggingface_hub before 0.35 asks for."""
        model = self._service.registry.find(model_in_path(request) or "")
        return json_response(build_model_status(model, self._service.monitor))

    async def health(self, request: Request) -> Response:
        """200 when the model can answer now."""
        model_id = model_in_path(request) or ""
        model = self._service.registry.find(model_id)
        if not is_loaded(model, self._service.monitor):
            raise model_loading_error(model_id)
        return json_response({"status": "ok"})

    def error_response(self, error: ServeError) -> Response:
        """`error` is a string, or a list for a bad field, as the hosted API answered."""
        body: dict[str, Any] = {"error": error.message, "code": error.code}
        if isinstance(error, InvalidField):
            body["error"] = [error.message]
        if error.field is not None:
            body["field"] = error.field
        if isinstance(error, ModelLoading):
            body["estimated_time"] = error.estimated_time_s
        if error.status == 429:
            body["error_type"] = "overloaded"
        return json_response(body, status=error.status, headers=retry_headers(error))


@cache
def any_body_schema() -> JsonSchema:
    """A body for any of the tasks."""
    own = [envelope_schema(task) for task in TASKS]
    return {"anyOf": [*own, *text2text_body_schemas(), envelope_body_schema()]}


@cache
def any_response_schema() -> JsonSchema:
    """An answer to any of them."""
    return {"anyOf": [schema_of(kind) for kind in RESPONSE_TYPES]}


def envelope_schema(name: str) -> JsonSchema:
    """The whole body of a task."""
    task = TASKS[name]
    return {
        "title": str(name),
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": task.inputs.schema(),
            "parameters": schema_of(task.parameters),
            "options": schema_of(RequestOptions),
        },
    }


def format_for_client(reply: InferenceResponse, options: RequestOptions, user_agent: str) -> Any:
    """The answer in the shape this client's generation reads; only zero-shot has two."""
    value = reply.result.value
    if reply.task is not TaskName.ZERO_SHOT_CLASSIFICATION:
        return value
    client = HUB_CLIENT.search(user_agent)
    old_client = client is not None and (int(client[1]), int(client[2])) < LIST_SINCE_VERSION
    if old_client if options.legacy_format is None else options.legacy_format:
        return value
    return [pair_labels(one) for one in value] if isinstance(value, list) else pair_labels(value)


def pair_labels(classified: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One text's labels and scores, paired."""
    pairs = zip(classified["labels"], classified["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
