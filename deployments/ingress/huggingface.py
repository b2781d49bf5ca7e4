"""The Hugging Face Inference API: task routes, one model per path.

POST /                                  the default model
POST /models/{id}                       the model's own task, or the one the inputs look like
POST /models/{id}/pipeline/{task}       a named task
POST /pipeline/{task}/{id}              the same, older form
GET  /models  /models/{id}  /models/{id}/info  /models/{id}/health
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.errors import InvalidField, ModelLoading, ServeError, UnknownParameter
from deployments.ingress.codec import json_response, read_json_object
from deployments.ingress.models import model_facts, model_list
from deployments.ingress.options import read_options
from deployments.ingress.service import (
    ESTIMATED_START_S,
    InferenceService,
    Question,
    Reply,
    not_served,
)
from deployments.manifest import TaskName
from deployments.tasks import TASKS, served_tasks

# Top-level keys every body may have. `stream` and `model` are sent by clients out of habit.
ENVELOPE = {"inputs", "parameters", "options", "stream", "model"}
# Clients before 0.30 send these beside, or instead of, `inputs`.
LIFTED = ("source_sentence", "sentences")
# Parameters newer clients write at the top level.
PARAMETERS = frozenset().union(*(task.parameters.model_fields for task in TASKS.values()))


class HuggingFaceRoutes:
    """Handlers of the family."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """Longest suffix first: a model id may itself contain slashes."""
        return [
            Route("/", self.infer, methods=["POST"]),
            Route("/models/{id:path}/pipeline/{task}", self.infer, methods=["POST"]),
            Route("/pipeline/{task}/{id:path}", self.infer, methods=["POST"]),
            Route("/models", self.list_models, methods=["GET"]),
            Route("/models/{id:path}/info", self.info, methods=["GET"]),
            Route("/models/{id:path}/health", self.health, methods=["GET"]),
            Route("/models/{id:path}", self.infer, methods=["POST"]),
            Route("/models/{id:path}", self.info, methods=["GET"]),
        ]

    async def infer(self, request: Request) -> Response:
        """Run a task."""
        body = await read_json_object(request, self._service.settings.limits.body_bytes)
        task = task_of(request.path_params.get("task"))
        reply = await self._service.answer(
            Question(
                inputs=inputs_of(body),
                model_id=model_id_of(request),
                task=task,
                parameters=parameters_of(body),
                options=read_options(body.get("options"), request.headers),
            )
        )
        return json_response(reply.answer.value, headers=reply_headers(reply))

    async def list_models(self, request: Request) -> Response:
        """Every configured model, also the refused ones."""
        return json_response(model_list(self._service))

    async def info(self, request: Request) -> Response:
        """One model."""
        model = self._service.registry.find(model_id_of(request) or "")
        return json_response(model_facts(model, self._service.board))

    async def health(self, request: Request) -> Response:
        """200 when the model can answer now."""
        model_id = model_id_of(request) or ""
        model = self._service.registry.find(model_id)
        if not served_tasks(model.manifest):
            raise not_served(model, model.manifest.tasks[0])
        if not any(lane.running for lane in self._service.board.states.values()):
            raise ModelLoading(
                f"Model {model_id} is currently loading", estimated_time_s=ESTIMATED_START_S
            )
        return json_response({"status": "ok"})


def model_id_of(request: Request) -> str | None:
    """The id in the path; it may contain slashes."""
    model_id: str | None = request.path_params.get("id")
    return model_id


def task_of(name: str | None) -> TaskName | None:
    """The task named in the path. Raises InvalidField."""
    if name is None:
        return None
    try:
        return TaskName(name)
    except ValueError as exc:
        known = ", ".join(f"`{task}`" for task in TASKS)
        raise InvalidField(f"`{name}` is not a task; known: {known}", field="task") from exc


def inputs_of(body: Mapping[str, Any]) -> Any:
    """`inputs`, or the task keys old clients put in its place. Raises InvalidField."""
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


def reply_headers(reply: Reply) -> dict[str, str]:
    """What the hosted API told in headers, and where the time went (milliseconds)."""
    timings = reply.answer.timings
    headers = {
        "x-compute-type": reply.answer.compute_type,
        "x-compute-time": f"{reply.total_s:.4f}",
        "x-compute-characters": str(reply.characters),
        "x-compute-tokens": str(timings.tokens),
        "x-sha": reply.model.manifest.source.revision,
        "server-timing": (
            f"encode;dur={timings.encode_s * 1e3:.2f}, queue;dur={timings.queue_s * 1e3:.2f}, "
            f"forward;dur={timings.forward_s * 1e3:.2f}, total;dur={reply.total_s * 1e3:.2f}"
        ),
    }
    if reply.answer.truncated:
        cut = f"{reply.answer.truncated} of {reply.items} texts"
        limit = reply.model.manifest.max_tokens
        headers["x-hf-warning"] = f"input-truncated; {cut} cut to {limit} tokens"
    return headers


def error_response(error: ServeError) -> Response:
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


def retry_headers(error: ServeError) -> dict[str, str]:
    """`Retry-After` in whole seconds, where trying again makes sense."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}
