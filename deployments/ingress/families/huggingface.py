"""The Hugging Face Inference API: task routes, one model per path.

POST /  /v1  /invocations               the body's `model`, else the default one
POST /models/{id}                       the model's own task, or the one the body is meant for
POST /models/{id}/pipeline/{task}       a named task
POST /pipeline/{task}/{id}              the same, older form
GET  /models  /models/{id}  /models/{id}/info  /models/{id}/health  /status/{id}

Models that generate text are asked, and answer, in the dialect of `text_generation`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import (
    InvalidField,
    MalformedBody,
    ModelLoading,
    ServeError,
    UnknownParameter,
)
from deployments.ingress.families.model_list import (
    is_loaded,
    model_facts,
    model_status,
    short_path_list,
)
from deployments.ingress.families.text_generation.questions import given_parameters
from deployments.ingress.families.text_generation.routes import (
    ENVELOPE_ANSWER,
    ENVELOPE_EXAMPLE,
    TextGenerationRoutes,
    generation_schema,
)
from deployments.ingress.generation import GenerationService
from deployments.ingress.http.api import Operation, schema_of
from deployments.ingress.http.codec import json_response, read_json
from deployments.ingress.http.naming import model_in_body, model_in_path
from deployments.ingress.http.options import RequestOptions, read_options
from deployments.ingress.http.replies import reply_headers, retry_headers
from deployments.ingress.service import (
    ESTIMATED_START_S,
    InferenceService,
    Question,
    Reply,
    claiming_task,
)
from deployments.manifest import TaskName
from deployments.tasks import TASKS
from deployments.tasks.inputs import JsonSchema
from deployments.tasks.text_classification import LabelScore

# Top-level keys every body may have. `stream` is sent by clients out of habit.
ENVELOPE = {"inputs", "parameters", "options", "stream", "model"}
# Clients before 0.30, and those of text-embeddings-inference, send these in place of `inputs`.
LIFTED = ("source_sentence", "sentences", "question", "context", "query", "texts")
# Parameters newer clients write at the top level.
PARAMETERS = frozenset().union(*(task.parameters.model_fields for task in TASKS.values()))
# huggingface_hub reads zero-shot answers as lists from 1.2 on, and as objects before.
HUB_CLIENT = re.compile(r"hf_hub/(\d{1,9})\.(\d{1,9})")
LISTS_SINCE = (1, 2)

# Every task's, and what zero-shot answers are presented as.
ANSWERS = (*(task.answer for task in TASKS.values()), list[LabelScore], ENVELOPE_ANSWER)
EXAMPLES: Mapping[str, Any] = {
    "embedding": {"inputs": ["A cat.", "A kitten."]},
    "similarity": {"inputs": {"source_sentence": "A cat.", "sentences": ["A kitten.", "A tax."]}},
    "classification": {"inputs": "A lovely film."},
    "zero-shot": {"inputs": "A film.", "parameters": {"candidate_labels": ["art", "food"]}},
    "ranking": {"inputs": {"query": "A film", "texts": ["A river.", "A lovely film."]}},
    "entities": {"inputs": "A city.", "parameters": {"aggregation_strategy": "simple"}},
    "question": {"inputs": {"question": "Was it good?", "context": "The food was good."}},
    "mask": {"inputs": "The food was [MASK].", "parameters": {"targets": ["good"]}},
}


class HuggingFaceRoutes:
    """Handlers of the family."""

    name: ClassVar = "Hugging Face"

    def __init__(self, service: InferenceService, generation: GenerationService) -> None:
        self._service = service
        self._writing = TextGenerationRoutes(service, generation)

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
            body={"anyOf": [*(envelope_schema(task) for task in TASKS), generation_schema()]},
            answer={"anyOf": [schema_of(kind) for kind in ANSWERS]},
            examples={**EXAMPLES, **examples},
            infers=True,
        )

    def _read(self, summary: str, path: str, handler: Any) -> Operation:
        return Operation(
            method="GET",
            paths=(path,),
            handler=handler,
            summary=summary,
            answer={"type": "object"},
        )

    def owns(self, path: str) -> bool:
        """Whatever no other family does."""
        return True

    async def infer(self, request: Request) -> Response:
        """Run a task."""
        body = envelope_of(await read_json(request, self._service.settings.limits))
        model_id = model_in_path(request) or model_in_body(body.get("model"))
        task = task_of(request.path_params.get("task"))
        if self._wants_text(body, model_id, task):
            return await self._writing.answer_envelope(request, body, model_id)
        reply = await self._service.answer(
            Question(
                inputs=inputs_of(body),
                model_id=model_id,
                task=task,
                parameters=parameters_of(body),
                options=(options := read_options(body.get("options"), request.headers)),
            )
        )
        return json_response(
            presented(reply, options, request.headers.get("user-agent", "")),
            headers=reply_headers(reply),
        )

    def _wants_text(
        self, body: Mapping[str, Any], model_id: str | None, task: TaskName | None
    ) -> bool:
        """Whether a model that generates text is meant. Raises UnknownModel or ArtifactError.

        Where no model is named, a stream of a text means the first that generates. Otherwise the
        first model of all is the default, unless a body is plainly meant for another's task.
        """
        if task not in (None, TaskName.TEXT_GENERATION):
            return False
        if model_id is not None:
            return self._service.registry.find(model_id).generates
        models = list(self._service.registry.open_models())
        others = [model for model in models if not model.generates]
        if len(others) == len(models):
            return False
        if body.get("stream") is True and isinstance(body.get("inputs"), str):
            return True
        inputs = body if body.get("inputs") is None else body["inputs"]
        question = Question(inputs=inputs, parameters=given_parameters(body))
        return models[0].generates and not any(claiming_task(question, m) for m in others)

    async def models(self, request: Request) -> Response:
        """Every configured model, also the refused ones."""
        return json_response(short_path_list(self._service))

    async def info(self, request: Request) -> Response:
        """One model."""
        model = self._service.registry.find(model_in_path(request) or "")
        return json_response(model_facts(model, self._service.board))

    async def status(self, request: Request) -> Response:
        """What huggingface_hub before 0.35 asks for."""
        model = self._service.registry.find(model_in_path(request) or "")
        return json_response(model_status(model, self._service.board))

    async def health(self, request: Request) -> Response:
        """200 when the model can answer now."""
        model_id = model_in_path(request) or ""
        model = self._service.registry.find(model_id)
        if not is_loaded(model, self._service.board):
            raise ModelLoading(
                f"Model {model_id} is currently loading", estimated_time_s=ESTIMATED_START_S
            )
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


def envelope_schema(name: TaskName) -> JsonSchema:
    """The whole body of a task."""
    task = TASKS[name]
    return {
        "title": name.value,
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": task.inputs.schema(),
            "parameters": schema_of(task.parameters),
            "options": schema_of(RequestOptions),
        },
    }


def task_of(name: str | None) -> TaskName | None:
    """The task named in the path. Raises InvalidField."""
    if name is None:
        return None
    try:
        return TaskName(name)
    except ValueError as exc:
        known = ", ".join(f"`{task}`" for task in (*TASKS, TaskName.TEXT_GENERATION))
        raise InvalidField(f"`{name}` is not a task; known: {known}", field="task") from exc


def envelope_of(body: Any) -> Mapping[str, Any]:
    """The body as an object: a bare text or list, as very old clients send it, is `inputs`.

    Raises MalformedBody.
    """
    if isinstance(body, str | list):
        return {"inputs": body}
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object, a text or a list", field="body")
    return body


def inputs_of(body: Mapping[str, Any]) -> Any:
    """`inputs`, or the task keys other clients put in its place. Raises InvalidField."""
    inputs = body.get("inputs")
    if inputs is not None:
        return inputs
    lifted = {key: body[key] for key in LIFTED if key in body}
    if not lifted:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return lifted


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, with those that newer clients write at the top level.

    Raises InvalidField, or UnknownParameter for a top-level key no task knows.
    """
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidField("`parameters` must be an object", field="parameters")
    loose = {k: v for k, v in body.items() if k not in ENVELOPE and k not in LIFTED}
    for key in loose:
        if key not in PARAMETERS:
            raise UnknownParameter(f"`{key}` is not known here", field=key)
    return {**loose, **(nested or {})}


def presented(reply: Reply, options: RequestOptions, user_agent: str) -> Any:
    """The answer in the shape this client's generation reads; only zero-shot has two."""
    value = reply.answer.value
    if reply.task is not TaskName.ZERO_SHOT_CLASSIFICATION:
        return value
    client = HUB_CLIENT.search(user_agent)
    old_client = client is not None and (int(client[1]), int(client[2])) < LISTS_SINCE
    if old_client if options.legacy_format is None else options.legacy_format:
        return value
    return [label_list(one) for one in value] if isinstance(value, list) else label_list(value)


def label_list(classified: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One text's labels and scores, paired."""
    pairs = zip(classified["labels"], classified["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
