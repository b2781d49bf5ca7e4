"""Routes of the Open Inference Protocol, version 2, with Triton's extensions.

GET  /v2  /v2/health/live  /v2/health/ready
GET  /v2/models/{id}[/versions/{version}][/ready|/config|/stats]   /v2/models/stats
POST /v2/models/{id}[/versions/{version}]/infer
POST /v2/repository/index  /v2/repository/models/{id}/load  /v2/repository/models/{id}/unload
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments import __version__
from deployments.errors import InvalidField, MalformedBody, ServeError
from deployments.ingress.apis.open_inference.inference import (
    NamedModel,
    add_version,
    infer_tensors,
)
from deployments.ingress.apis.open_inference.message import (
    LENGTH_HEADER,
    InferRequest,
    InferResponse,
    infer_response,
    split_body,
)
from deployments.ingress.apis.open_inference.metadata import (
    IndexEntry,
    ModelMetadata,
    model_config,
    model_metadata,
    repository_index,
)
from deployments.ingress.apis.open_inference.statistics import ModelStatistics, StatisticsResponse
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.model_list import is_loaded
from deployments.ingress.apis.shared.response_headers import INFERENCE_HEADERS
from deployments.ingress.http.api import (
    Access,
    ErrorFormat,
    Handler,
    Operation,
    build_schema,
    parse_body,
)
from deployments.ingress.http.bodies import json_response, parse_json, read_body
from deployments.ingress.http.error_responses import retry_headers
from deployments.ingress.http.errors import replace_status_422
from deployments.ingress.http.request_fields import model_in_path, set_options_source
from deployments.ingress.models.resolver import wrong_route_error
from deployments.management.listing import list_default_versions
from deployments.registry import RegisteredModel
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


def open_inference_error(error: ServeError) -> Response:
    """Build the error response. Status 422 becomes 400.

    Clients read only the text under `error`.
    """
    return json_response(
        {"error": error.message, "code": error.code},
        status=replace_status_422(error),
        headers=retry_headers(error),
    )


OPEN_INFERENCE_ERROR_FORMAT = ErrorFormat(
    "Open Inference Protocol", open_inference_error, replace_status_422
)


class OpenInferenceRoutes:
    """Handlers of the Open Inference Protocol."""

    name: ClassVar = "Open Inference Protocol"
    error_format: ClassVar = OPEN_INFERENCE_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._services = context.services
        self._statistics = ModelStatistics()
        self._pipeline.add_recorder(self._statistics)

    def operations(self) -> Sequence[Operation]:
        """Return the operations. `/v2/models/{id}` comes after the longer paths.

        A model id may contain slashes, so `/v2/models/{id}` also matches the longer paths.
        """
        return (
            _get_operation(
                "Name, version and extensions of the server",
                self.server,
                "/v2",
                access=Access.PUBLIC,
            ),
            _get_operation(
                "Health of this process", self.live, "/v2/health/live", access=Access.PUBLIC
            ),
            _get_operation(
                "Readiness of the cluster", self.ready, "/v2/health/ready", access=Access.PUBLIC
            ),
            _get_operation(
                "Statistics of the configured models",
                self.all_stats,
                "/v2/models/stats",
                response=StatisticsResponse,
            ),
            Operation(
                method="POST",
                paths=(VERSION + "/infer", MODEL + "/infer"),
                handler=self.infer,
                summary="Run a task on tensors",
                access=Access.INFER,
                body=build_schema(InferRequest),
                response=build_schema(InferResponse),
                examples=EXAMPLES,
                runs_model=True,
                headers=INFERENCE_HEADERS,
            ),
            _model_read("/ready", "Readiness of a model", self.model_ready),
            _tensors_read("/config", "Triton configuration of a model", self.config, _OBJECT),
            _model_read("/stats", "Statistics of a model", self.stats, StatisticsResponse),
            _tensors_read("", "Tensors of a model", self.metadata, build_schema(ModelMetadata)),
            *self._repository_operations(),
        )

    def _repository_operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                paths=("/v2/repository/index",),
                handler=self.index,
                summary="List the models of the store, including rejected ones",
                access=Access.ADMIN,
                body=_INDEX_BODY,
                response=build_schema(list[IndexEntry]),
                examples={"ready models": {"ready": True}},
            ),
            Operation(
                method="POST",
                paths=("/v2/repository/models/{id:path}/load",),
                handler=self.load,
                summary="Load a model into all its replicas",
                access=Access.ADMIN,
                changes_models=True,
                body=_LOAD_BODY,
                response=_OBJECT,
                examples={"no changes": {}},
            ),
            Operation(
                method="POST",
                paths=("/v2/repository/models/{id:path}/unload",),
                handler=self.unload,
                summary="Remove a model from memory; the next request loads it again",
                access=Access.ADMIN,
                changes_models=True,
                body=_LOAD_BODY,
                response=_OBJECT,
            ),
        )

    async def server(self, request: Request) -> Response:
        return json_response(
            {"name": SERVER_NAME, "version": __version__, "extensions": EXTENSIONS}
        )

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Answer 200 if the server can answer requests without `options`, else 503."""
        if missing := self._pipeline.list_missing():
            return json_response({"ready": False, "error": "; ".join(missing)}, status=503)
        return json_response({"ready": True})

    async def infer(self, request: Request) -> Response:
        body = await read_body(request, self._pipeline.settings.limits)
        header, binary = split_body(body, request.headers.get(LENGTH_HEADER))
        set_options_source(request, header, "parameters")
        named = NamedModel(find_model_name(request), self._model(request))
        message = parse_body(InferRequest, parse_json(header))
        answer = await infer_tensors(self._pipeline, named, message, binary, request.headers)
        head = {"model_name": answer.model.id, "model_version": answer.model.version}
        if message.id is not None:
            head["id"] = message.id
        return infer_response(head, answer.outputs, answer.selection, answer.headers)

    async def model_ready(self, request: Request) -> Response:
        model = self._model(request)
        content: dict[str, Any] = {
            "name": model.ref.id,
            "ready": is_loaded(model, self._pipeline.monitor),
        }
        if not content["ready"]:
            content["error"] = f"Model {model.ref.id} is not loaded"
        return json_response(content, status=200 if content["ready"] else 503)

    async def metadata(self, request: Request) -> Response:
        model = self._model_of_tensors(request)
        usable = self._pipeline.permitted.list_versions(model.ref.id)
        return json_response(model_metadata(model, [one.ref.version for one in usable]))

    async def config(self, request: Request) -> Response:
        model = self._model_of_tensors(request)
        max_items = self._pipeline.admission.find_max_texts(model.manifest)
        return json_response(model_config(model, max_items))

    async def stats(self, request: Request) -> Response:
        return json_response(
            {"model_stats": [self._statistics.build_stats(self._model(request).ref)]}
        )

    async def all_stats(self, request: Request) -> Response:
        models = self._pipeline.permitted.open_models()
        return json_response({"model_stats": [self._statistics.build_stats(m.ref) for m in models]})

    async def index(self, request: Request) -> Response:
        """List the models of the store. With `ready: true` in the body, list only ready models."""
        only_ready = (await self._optional_object(request)).get("ready")
        if only_ready is not None and not isinstance(only_ready, bool):
            raise InvalidField("`ready` must be a boolean", field="ready")
        stored = await asyncio.to_thread(list_default_versions, self._services.builds.store)
        loaded = {(one.model, one.version) for one in await self._services.memory.list_loaded()}
        entries = repository_index(self._pipeline, stored, loaded, only_ready=bool(only_ready))
        return json_response(entries)

    async def load(self, request: Request) -> Response:
        """Load a model into all its replicas. Raises ServeError with the reason if it fails."""
        body = await self._optional_object(request)
        if body.get("parameters"):
            raise InvalidField("`parameters` cannot change a sealed model", field="parameters")
        await self._services.memory.load(model_in_path(request) or "")
        return json_response({})

    async def unload(self, request: Request) -> Response:
        """Remove a model from the memory of all replicas; the next request loads it again."""
        await self._services.memory.unload(model_in_path(request) or "")
        return json_response({})

    def _model(self, request: Request) -> RegisteredModel:
        """Find the model, or the version that the path names.

        Raises Forbidden, UnknownModel or ArtifactError.
        """
        return self._pipeline.permitted.find(find_model_name(request))

    def _model_of_tensors(self, request: Request) -> RegisteredModel:
        """Find an encoder model. Raises WrongTask for generative models, which have no tensors."""
        model = self._model(request)
        if model.is_generative:
            raise wrong_route_error(model)
        return model

    async def _optional_object(self, request: Request) -> Mapping[str, Any]:
        """Parse the body; an empty body is {}. Raises MalformedBody."""
        raw = await read_body(request, self._pipeline.settings.limits)
        body = parse_json(raw) if raw.strip() else {}
        if not isinstance(body, dict):
            raise MalformedBody("the body must be a JSON object", field="body")
        return body


def find_model_name(request: Request) -> str:
    """Return the name in the path, with the version if the path names one."""
    return add_version(model_in_path(request) or "", request.path_params.get("version"))


def _get_operation(
    summary: str,
    handler: Handler,
    *paths: str,
    response: Any = None,
    access: Access = Access.INFER,
) -> Operation:
    return Operation(
        method="GET",
        paths=paths,
        handler=handler,
        summary=summary,
        access=access,
        response=_OBJECT if response is None else build_schema(response),
    )


def _model_read(suffix: str, summary: str, handler: Handler, response: Any = None) -> Operation:
    return _get_operation(summary, handler, VERSION + suffix, MODEL + suffix, response=response)


def _tensors_read(suffix: str, summary: str, handler: Handler, response: JsonSchema) -> Operation:
    """Build the operation of a route for models with tensors. Generative models get status 400."""
    return Operation(
        method="GET",
        paths=(VERSION + suffix, MODEL + suffix),
        handler=handler,
        summary=summary,
        access=Access.INFER,
        response=response,
        other_responses={400: _OBJECT},
    )
