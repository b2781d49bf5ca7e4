"""Methods of the Open Inference Protocol over gRPC, and gRPC's health check.

HAProxy turns gRPC's HTTP/2 into HTTP/1.1 (cluster/edge/grpc_frontend.py), so a call is a POST with
the path of the method. It passes the gate, the limits and the request log as any other request. The
server adds the status of a success as trailer (http/server.py).

protobuf is imported at the first call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from deployments import __version__
from deployments.config import LimitSettings
from deployments.errors import (
    DeadlineExceeded,
    InvalidField,
    MethodNotAllowed,
    ServeError,
    UnknownRoute,
)
from deployments.grpc_status import (
    GRPC_TYPE,
    HEALTH_CHECK,
    HEALTH_PACKAGE,
    INFERENCE_PACKAGE,
    INFERENCE_SERVICE,
    GrpcStatus,
    build_error_headers,
    from_http_status,
)
from deployments.ingress.apis.open_inference.inference import (
    NamedModel,
    add_version,
    infer_tensors,
)
from deployments.ingress.apis.open_inference.metadata import TensorMetadata, model_metadata
from deployments.ingress.apis.open_inference.routes import SERVER_NAME
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.model_list import is_loaded
from deployments.ingress.http.api import Access, ErrorFormat, Handler, Operation
from deployments.ingress.http.bodies import read_body, replace_body
from deployments.ingress.http.error_responses import retry_headers
from deployments.ingress.http.errors import replace_status_422
from deployments.ingress.http.request_fields import set_options_source
from deployments.ingress.models.resolver import wrong_route_error
from deployments.request_headers import GRPC_TIMEOUT_HEADER, OPTION_HEADERS

EXTENSIONS = ("parameters",)
# Maximum bytes of a health check, which needs no key. It has the name of a service.
MAX_HEALTH_BYTES = 1_024
TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
# Milliseconds of the units of a time limit.
TIMEOUT_UNITS_MS = {"H": 3_600_000, "M": 60_000, "S": 1_000, "m": 1, "u": 1e-3, "n": 1e-6}
DEADLINE_HEADER = next(name for name, option in OPTION_HEADERS.items() if option == "deadline_ms")


def grpc_error(error: ServeError) -> Response:
    """Build the response of a failed call: no message, the status in the head.

    `grpc-retry-pushback-ms` tells clients with a retry policy when to retry.
    """
    status = from_http_status(error.status)
    if isinstance(error, UnknownRoute | MethodNotAllowed):
        status = GrpcStatus.UNIMPLEMENTED
    headers = build_error_headers(status, error.message) | retry_headers(error)
    if error.retry_after_s is not None:
        headers["grpc-retry-pushback-ms"] = str(round(error.retry_after_s * 1000))
    return Response(headers=headers)


class UnknownService(ServeError):
    """A gRPC health check names a service that this server does not have."""

    status, code = 404, "unknown_service"


GRPC_ERROR_FORMAT = ErrorFormat("gRPC", grpc_error, replace_status_422)


class GrpcMessage(Response):
    """A protobuf message as response. It has no length, because a trailer follows it."""

    def __init__(self, message: Any, headers: Mapping[str, str] = {}) -> None:
        self.status_code = 200
        self.background = None
        self.body = _messages().frame_message(message)
        self.raw_headers = [
            (name.encode("latin-1"), text.encode("latin-1"))
            for name, text in {"content-type": GRPC_TYPE, **headers}.items()
        ]


class GrpcInferenceRoutes:
    """Handlers of the methods."""

    name: ClassVar = "Open Inference Protocol over gRPC"
    error_format: ClassVar = GRPC_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        return (
            _call("ServerLive", self.live, Access.PUBLIC),
            _call("ServerReady", self.ready, Access.PUBLIC),
            _call("ServerMetadata", self.server, Access.PUBLIC),
            _call("ModelReady", self.model_ready),
            _call("ModelMetadata", self.metadata),
            _call("ModelInfer", self.infer, runs_model=True),
            _operation(HEALTH_CHECK, self.check_health, Access.PUBLIC),
        )

    async def live(self, request: Request) -> Response:
        return _respond("ServerLiveResponse", live=True)

    async def ready(self, request: Request) -> Response:
        return _respond("ServerReadyResponse", ready=not self._pipeline.list_missing())

    async def server(self, request: Request) -> Response:
        return _respond(
            "ServerMetadataResponse",
            name=SERVER_NAME,
            version=__version__,
            extensions=EXTENSIONS,
        )

    async def model_ready(self, request: Request) -> Response:
        message = await self._read(request, "ModelReadyRequest")
        model = self._find(message.name, message.version).model
        return _respond("ModelReadyResponse", ready=is_loaded(model, self._pipeline.monitor))

    async def metadata(self, request: Request) -> Response:
        message = await self._read(request, "ModelMetadataRequest")
        model = self._find(message.name, message.version).model
        if model.is_generative:
            raise wrong_route_error(model)
        usable = self._pipeline.permitted.list_versions(model.ref.id)
        described = model_metadata(model, [one.ref.version for one in usable])
        return _respond(
            "ModelMetadataResponse",
            name=described["name"],
            versions=described["versions"],
            platform=described["platform"],
            inputs=[_describe_tensor(tensor) for tensor in described["inputs"]],
            outputs=[_describe_tensor(tensor) for tensor in described["outputs"]],
        )

    async def infer(self, request: Request) -> Response:
        sent = await self._read(request, "ModelInferRequest")
        named = self._find(sent.model_name, sent.model_version)
        message, binary = _messages().convert_request(sent)
        parameters = message.parameters or {}
        set_options_source(request, orjson.dumps({"parameters": parameters}), "parameters")
        headers = _with_deadline(request.headers)
        answer = await infer_tensors(self._pipeline, named, message, binary, headers)
        response = _messages().find_type("ModelInferResponse")(
            model_name=answer.model.id, model_version=answer.model.version, id=sent.id
        )
        outputs = {tensor.name: tensor for tensor in answer.outputs}
        _messages().fill_outputs(
            response, [outputs[selected.name] for selected in answer.selection]
        )
        return GrpcMessage(response, answer.headers)

    async def check_health(self, request: Request) -> Response:
        """Return whether the server, or its service of this protocol, answers requests."""
        limits = self._pipeline.settings.limits.model_copy(update={"body_bytes": MAX_HEALTH_BYTES})
        sent = await self._read(request, "HealthCheckRequest", limits, HEALTH_PACKAGE)
        if sent.service not in ("", INFERENCE_SERVICE.strip("/")):
            raise UnknownService(f"there is no service `{sent.service}`")
        kind = _messages().find_type("HealthCheckResponse", HEALTH_PACKAGE)
        is_ready = not self._pipeline.list_missing()
        return GrpcMessage(kind(status=kind.SERVING if is_ready else kind.NOT_SERVING))

    async def _read(
        self,
        request: Request,
        name: str,
        limits: LimitSettings | None = None,
        package: str = INFERENCE_PACKAGE,
    ) -> Any:
        limits = limits or self._pipeline.settings.limits
        body = await read_body(request, limits)
        encoding = request.headers.get("grpc-encoding", "")
        frame = _messages().inflate_frame(body, encoding, limits.body_bytes)
        if frame is not body:
            replace_body(request, frame)
        return _messages().parse_message(name, frame, package)

    def _find(self, name: str, version: str) -> NamedModel:
        """Find a model. Raises Forbidden, UnknownModel or ArtifactError."""
        full_name = add_version(name, version)
        return NamedModel(full_name, self._pipeline.permitted.find(full_name))


def _call(
    method: str, handler: Handler, access: Access = Access.INFER, *, runs_model: bool = False
) -> Operation:
    return _operation(INFERENCE_SERVICE + method, handler, access, runs_model=runs_model)


def _operation(
    path: str, handler: Handler, access: Access, *, runs_model: bool = False
) -> Operation:
    return Operation(
        method="POST",
        paths=(path,),
        handler=handler,
        summary=f"gRPC method {path.rpartition('/')[2]}",
        access=access,
        runs_model=runs_model,
        hidden=True,  # OpenAPI describes no gRPC
    )


def _describe_tensor(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor["name"], "datatype": tensor["datatype"], "shape": tensor["shape"]}


def _respond(kind: str, **fields: Any) -> Response:
    return GrpcMessage(_messages().find_type(kind)(**fields))


def _messages() -> ModuleType:
    """Import the module that needs protobuf."""
    from deployments.ingress.apis.open_inference import grpc_messages

    return grpc_messages


def _with_deadline(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers whose deadline is that of the call, unless they have another one.

    Raises DeadlineExceeded if less than a millisecond is left, InvalidField for no time limit.
    """
    sent = headers.get(GRPC_TIMEOUT_HEADER)
    if sent is None or DEADLINE_HEADER in headers:
        return headers
    timeout = TIMEOUT.fullmatch(sent)
    if timeout is None:
        raise InvalidField(
            f"`{GRPC_TIMEOUT_HEADER}` must be up to eight digits and a unit, one of "
            f"{', '.join(TIMEOUT_UNITS_MS)}",
            field=GRPC_TIMEOUT_HEADER,
        )
    deadline_ms = int(int(timeout[1]) * TIMEOUT_UNITS_MS[timeout[2]])
    if deadline_ms < 1:
        raise DeadlineExceeded(f"the time limit of the call, {sent}, has passed")
    return {**headers, DEADLINE_HEADER: str(deadline_ms)}
