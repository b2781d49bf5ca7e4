"""The Open Inference Protocol, version 2, with Triton's extensions for tensors and models.

GET  /v2  /v2/health/live  /v2/health/ready
GET  /v2/models/{id}[/versions/{version}][/ready|/config|/stats]   /v2/models/stats
POST /v2/models/{id}[/versions/{version}]/infer
POST /v2/repository/index  /v2/repository/models/{id}/load  /v2/repository/models/{id}/unload
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidField, MalformedBody, ServeError, UnknownModel
from deployments.ingress.apis.model_list import is_loaded
from deployments.ingress.apis.open_inference.message import (
    LENGTH_HEADER,
    InferRequest,
    InferResponse,
    infer_response,
    read_tensors,
    select_outputs,
    split_body,
)
from deployments.ingress.apis.open_inference.metadata import (
    IndexEntry,
    ModelMetadata,
    model_config,
    model_metadata,
    repository_index,
)
from deployments.ingress.apis.open_inference.requests import parse_tensor_request
from deployments.ingress.apis.open_inference.statistics import ModelStatistics, StatisticsResponse
from deployments.ingress.apis.open_inference.task_tensors import find_task_tensors
from deployments.ingress.apis.response_headers import (
    INFERENCE_HEADERS,
    inference_headers,
    retry_headers,
)
from deployments.ingress.http.api import Handler, Operation, parse_body, schema_of
from deployments.ingress.http.bodies import json_response, parse_json, read_body
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_options import model_in_path
from deployments.ingress.service import InferenceService, wrong_route_error
from deployments.registry import RegisteredModel
from deployments.release import RELEASE
from deployments.tasks.inputs import JsonSchema

SERVER_NAME = "hundredfold"
EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
MODEL = "/v2/models/{id:path}"
VERSION = MODEL + "/versions/{version}"
CONFIGURED = "models are configured in serve_config.yaml"

_OBJECT: JsonSchema = {"type": "object"}
_INDEX_BODY: JsonSchema = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
_LOAD_BODY: JsonSchema = {"type": "object", "properties": {"parameters": {"type": "object"}}}
EXAMPLES: Mapping[str, Any] = {
    "two texts": {
        "id": "42",
        "inputs": [
            {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["A cat.", "A kitten."]}
        ],
    }
}


class OpenInferenceRoutes:
    """Handlers of the family."""

    name: ClassVar = "Open Inference Protocol"

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._statistics = ModelStatistics()
        service.add_recorder(self._statistics)

    def operations(self) -> Sequence[Operation]:
        """Longest suffix first: a model id may itself contain slashes."""
        return (
            _get_operation("The server and what it can do", self.server, "/v2"),
            _get_operation("Whether this process answers", self.live, "/v2/health/live"),
            _get_operation("Whether requests can be answered", self.ready, "/v2/health/ready"),
            _get_operation(
                "Statistics of every model",
                self.all_stats,
                "/v2/models/stats",
                response=StatisticsResponse,
            ),
            Operation(
                method="POST",
                paths=(VERSION + "/infer", MODEL + "/infer"),
                handler=self.infer,
                summary="Run a task on tensors",
                body=schema_of(InferRequest),
                response=schema_of(InferResponse),
                examples=EXAMPLES,
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
            _model_read("/ready", "Whether a model can answer now", self.model_ready),
            _tensors_read("/config", "Triton's configuration of a model", self.config, _OBJECT),
            _model_read("/stats", "Statistics of a model", self.stats, StatisticsResponse),
            _tensors_read("", "A model's tensors", self.metadata, schema_of(ModelMetadata)),
            *self._repository_operations(),
        )

    def _repository_operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                paths=("/v2/repository/index",),
                handler=self.index,
                summary="Every configured model, also the refused ones",
                body=_INDEX_BODY,
                response=schema_of(list[IndexEntry]),
                examples={"only those that can answer now": {"ready": True}},
            ),
            Operation(
                method="POST",
                paths=("/v2/repository/models/{id:path}/load",),
                handler=self.load,
                summary="Whether a model is loaded, as every configured one is",
                body=_LOAD_BODY,
                response=_OBJECT,
                examples={"as it is configured": {}},
            ),
            Operation(
                method="POST",
                paths=("/v2/repository/models/{id:path}/unload",),
                handler=self.unload,
                summary="Refused: what is served is configured",
                body=_LOAD_BODY,
                response=_OBJECT,
            ),
        )

    def owns(self, path: str) -> bool:
        """Everything under `/v2` but Cohere's rerank."""
        return path == "/v2" or (path.startswith("/v2/") and path.rstrip("/") != "/v2/rerank")

    async def server(self, request: Request) -> Response:
        """The server and what it can do."""
        return json_response({"name": SERVER_NAME, "version": RELEASE, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        """This process answers."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """200 when requests without special wishes can be answered, else 503."""
        missing = self._service.monitor.missing()
        if not any(True for _ in self._service.registry.open_models()):
            missing.append("no model could be opened")
        if missing:
            return json_response({"ready": False, "error": "; ".join(missing)}, status=503)
        return json_response({"ready": True})

    async def infer(self, request: Request) -> Response:
        """Run a task."""
        limits = self._service.settings.limits
        model = self._model(request)
        header, binary = split_body(
            await read_body(request, limits), request.headers.get(LENGTH_HEADER)
        )
        message = parse_body(InferRequest, parse_json(header))
        tensors = read_tensors(message.inputs, binary)
        asked = parse_tensor_request(model, message.parameters or {}, tensors, request.headers)
        form = find_task_tensors(asked.task)
        wanted = select_outputs(message, [spec.name for spec in form.outputs])
        with rename_error_fields(asked.names):
            response = await self._service.infer(asked.question)
        head = {"model_name": model.ref.id, "model_version": model.ref.version}
        if message.id is not None:
            head["id"] = message.id
        outputs = form.to_outputs(response.result.value)
        return infer_response(head, outputs, wanted, inference_headers(response))

    async def model_ready(self, request: Request) -> Response:
        """200 when the model can answer now, else 503."""
        model = self._model(request)
        told: dict[str, Any] = {
            "name": model.ref.id,
            "ready": is_loaded(model, self._service.monitor),
        }
        if not told["ready"]:
            told["error"] = f"Model {model.ref.id} is not loaded"
        return json_response(told, status=200 if told["ready"] else 503)

    async def metadata(self, request: Request) -> Response:
        """The model's tensors."""
        return json_response(model_metadata(self._model_of_tensors(request)))

    async def config(self, request: Request) -> Response:
        """The model as Triton would be configured for it."""
        limits = self._service.settings.limits
        return json_response(model_config(self._model_of_tensors(request), limits.items))

    async def stats(self, request: Request) -> Response:
        """What the model has answered so far."""
        return json_response({"model_stats": [self._statistics.of(self._model(request).ref)]})

    async def all_stats(self, request: Request) -> Response:
        """What every model has answered so far."""
        models = self._service.registry.open_models()
        return json_response({"model_stats": [self._statistics.of(m.ref) for m in models]})

    async def index(self, request: Request) -> Response:
        """Every configured model; with `ready`, those that can answer now."""
        only_ready = (await self._optional_object(request)).get("ready")
        if only_ready is not None and not isinstance(only_ready, bool):
            raise InvalidField("`ready` must be a boolean", field="ready")
        return json_response(repository_index(self._service, only_ready=bool(only_ready)))

    async def load(self, request: Request) -> Response:
        """Nothing to do for a configured model that was opened; the reason why not otherwise."""
        body = await self._optional_object(request)
        try:
            self._service.registry.find(model_in_path(request) or "")
        except UnknownModel as error:
            raise UnknownModel(f"{error.message}; {CONFIGURED}", field=error.field) from error
        if body.get("parameters"):
            raise InvalidField(
                f"`parameters` cannot change a model: {CONFIGURED}", field="parameters"
            )
        return json_response({})

    async def unload(self, request: Request) -> Response:
        """Always refused. Raises UnknownModel for one that is not there at all."""
        model = self._service.registry.find(model_in_path(request) or "")
        raise InvalidField(f"Model {model.ref.id} stays loaded: {CONFIGURED}", field="model")

    def error_response(self, error: ServeError) -> Response:
        """A string under `error`, all that its clients read; what a request may not be is 400."""
        status = 400 if error.status == 422 else error.status
        return json_response(
            {"error": error.message, "code": error.code},
            status=status,
            headers=retry_headers(error),
        )

    def _model(self, request: Request) -> RegisteredModel:
        """The model of the path, in the version of the path. Raises UnknownModel."""
        model = self._service.registry.find(model_in_path(request) or "")
        version = request.path_params.get("version", model.ref.version)
        if version != model.ref.version:
            raise UnknownModel(
                f"Model {model.ref.id} has no version {version}; served is {model.ref.version}",
                field="version",
            )
        return model

    def _model_of_tensors(self, request: Request) -> RegisteredModel:
        """The same, which has a form in tensors: text is generated elsewhere. Raises WrongTask."""
        model = self._model(request)
        if model.is_generative:
            raise wrong_route_error(model)
        return model

    async def _optional_object(self, request: Request) -> Mapping[str, Any]:
        """The body, an empty one as {}. Raises MalformedBody."""
        raw = await read_body(request, self._service.settings.limits)
        body = parse_json(raw) if raw.strip() else {}
        if not isinstance(body, dict):
            raise MalformedBody("the body must be a JSON object", field="body")
        return body


def _get_operation(summary: str, handler: Handler, *paths: str, response: Any = None) -> Operation:
    return Operation(
        method="GET",
        paths=paths,
        handler=handler,
        summary=summary,
        response=_OBJECT if response is None else schema_of(response),
    )


def _model_read(suffix: str, summary: str, handler: Handler, response: Any = None) -> Operation:
    return _get_operation(summary, handler, VERSION + suffix, MODEL + suffix, response=response)


def _tensors_read(suffix: str, summary: str, handler: Handler, response: JsonSchema) -> Operation:
    """Refused for models that generate text."""
    return Operation(
        method="GET",
        paths=(VERSION + suffix, MODEL + suffix),
        handler=handler,
        summary=summary,
        response=response,
        other_responses={400: _OBJECT},
    )
