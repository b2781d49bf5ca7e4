"""The OpenAPI 3.1 document, built from the operations of every API.

Request and response schemas come from the types that validate the bodies. The examples of error
responses are built with the error format of the operation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from deployments import __version__
from deployments.errors import (
    ArtifactMissing,
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    Forbidden,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    MalformedBody,
    ModelInUse,
    ModelLoading,
    ModelUnavailable,
    Overloaded,
    ServeError,
    StoreNotWritable,
    TooManyItems,
    Unauthorized,
    UnknownModel,
    UnknownParameter,
    UnsupportedEncoding,
    WrongTask,
)
from deployments.ingress.apis.documentation.components import Components, infer_schema
from deployments.ingress.http.api import Access, ApiRoutes, ErrorFormat, Operation
from deployments.ingress.http.request_fields import HEADER_WORDS, REQUIRED_WORD
from deployments.request_headers import OPTION_HEADERS
from deployments.tasks import list_task_names
from deployments.tasks.inputs import JsonSchema

_NO_MODEL = UnknownModel("Model org/name does not exist", field="model")
_REFUSED = ArtifactMissing("Model org/name is not usable: nothing was built under this id")
_LOADING = ModelLoading("Model org/name is currently loading", estimated_time_s=20.0)

# Errors of paths with a model id.
MODEL_ERRORS: tuple[ServeError, ...] = (_NO_MODEL, _REFUSED, _LOADING)

# Errors of operations that need a key, on a server that has keys.
KEY_ERRORS: tuple[ServeError, ...] = (
    Unauthorized("the API key is missing"),
    Forbidden("the key `alice` lacks the scope `admin`. It has: infer"),
)

# Errors of operations that change models.
MANAGEMENT_ERRORS: tuple[ServeError, ...] = (
    InvalidField("Model org/name stays loaded: it is pinned", field="model"),
    ModelInUse("Model org/name is in use"),
    StoreNotWritable("the store cannot be written"),
)

# Errors of operations with a body.
BODY_ERRORS: tuple[ServeError, ...] = (
    MalformedBody("the body is not JSON in UTF-8", field="body"),
    InvalidField("Error in `inputs`: field required", field="inputs"),
    EmptyInput("`inputs` is empty", field="inputs"),
    WrongTask("Model org/name cannot do `fill-mask`", field="model"),
    HardwareUnavailable("this cluster runs no `gpu` encoder", field="options.use_gpu"),
    _NO_MODEL,
    BodyTooSlow("the body took more than 20 seconds", field="body"),
    BodyTooLarge("the body has more than 2000000 bytes", field="body"),
    UnsupportedEncoding("`content-encoding` is not supported", field="content-encoding"),
    UnknownParameter("`parameters.topk` is unknown", field="parameters.topk"),
    TooManyItems("`inputs` has 5000 items; the maximum is 1024", field="inputs"),
    InputTooLong("`inputs[3]` has 700 tokens; the maximum is 512", field="inputs[3]"),
    Overloaded("Model is overloaded"),
    EngineFailed("the engine failed"),
    _REFUSED,
    _LOADING,
    ModelUnavailable("org/name failed 10 times in a row; it is tried again within 4 s"),
    DeadlineExceeded("the request took more than 30 seconds"),
)

DESCRIPTION = """\
One server with several APIs. Each is compatible with the clients of the service in its name.

Bodies are JSON in UTF-8; the `content-type` of requests is ignored. Bodies with
`content-encoding: gzip` or `deflate` are decompressed. The last of two equal keys is used. Each API
has its own error format.

The schema of a `text/event-stream` is that of an event, whose `data` is JSON. The last event of
OpenAI's streams is `[DONE]`, which is not JSON.

Every response has `x-request-id`: that of the request, if it has one. Only answers of the proxy,
such as 429 for too many requests in flight, lack it. With a key whose requests or tokens per minute
are limited, a response has `x-ratelimit-limit-requests`, `x-ratelimit-remaining-requests`
and `x-ratelimit-reset-requests`, and the same for `tokens`.

Requests may name the trace of which they are a part in `traceparent` (W3C Trace Context).\
"""
PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
EVENTS = "text/event-stream"
FLAGS = ["true", "false", "1", "0"]
HEADER_SCHEMAS: Mapping[str, Any] = {
    **{key: {"type": "string", "enum": list(words)} for key, words in HEADER_WORDS.items()},
    "use_gpu": {"type": "string", "enum": [*FLAGS, REQUIRED_WORD]},
    "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
}
KEY_SCHEME = "key"

OPTIONS = {
    "x-use-cache": "`false` bypasses the response cache.",
    "x-wait-for-model": "`true` waits for a replica that starts; otherwise the status is 503.",
    "x-use-gpu": (
        "`true` prefers the GPU; without one the CPU computes and the response header "
        "`x-compute-fallback` is set. With `required` the status is 400 instead."
    ),
    "x-hardware": "Required device. The request fails if it is not available.",
    "x-compute": (
        "`auto` lets the server choose the cheapest hardware that answers in time; `gpu` is a hint "
        "like `x-use-gpu`. `x-compute-type` names the hardware that answered."
    ),
    "x-request-timeout-ms": (
        "Milliseconds until the client needs the answer. Status 429 at once if the server cannot "
        "keep it, 504 if it passes."
    ),
    "x-priority": "`batch` lets interactive requests go first.",
}


def openapi_document(apis: Sequence[ApiRoutes], model_ids: Sequence[str]) -> dict[str, Any]:
    """Build the document. `model_ids` are examples for the path parameter of a model id."""
    components = Components()
    paths: dict[str, dict[str, Any]] = {}
    for api in apis:
        for operation in api.operations():
            for route in operation.paths if not operation.hidden else ():
                # The router serves the first of two equal routes.
                item = paths.setdefault(to_openapi_path(route), {})
                if operation.method.lower() in item:
                    continue
                item[operation.method.lower()] = {
                    **describe_operation(api, operation, route, components),
                    "parameters": parameters(operation, route, model_ids),
                    "responses": {
                        **build_responses(operation, components),
                        **error_responses(
                            operation,
                            route,
                            operation.error_formats or (api.error_format,),
                            components,
                        ),
                    },
                }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hundredfold", "version": __version__, "description": DESCRIPTION},
        "tags": [{"name": api.name} for api in apis],
        "paths": paths,
        "components": {
            "schemas": components.schemas,
            "securitySchemes": {KEY_SCHEME: {"type": "http", "scheme": "bearer"}},
        },
    }


def describe_operation(
    api: ApiRoutes, operation: Operation, route: str, components: Components
) -> dict[str, Any]:
    documented: dict[str, Any] = {
        "operationId": operation.method.lower()
        + (to_pascal_case(to_openapi_path(route)) or "Root"),
        "tags": [api.name],
        "summary": operation.summary,
        "x-access": operation.access.value,
    }
    if operation.access is not Access.PUBLIC:
        documented["security"] = [{KEY_SCHEME: []}, {}]  # {}: a server without keys
    if operation.body is not None:
        schema = components.add_schema(f"{to_pascal_case(operation.summary)}Body", operation.body)
        content: dict[str, Any] = {"schema": schema}
        if operation.examples:
            content["examples"] = {k: {"value": v} for k, v in operation.examples.items()}
        documented["requestBody"] = {"required": True, "content": {"application/json": content}}
    return documented


def parameters(operation: Operation, route: str, model_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Build the parameters of a route: those in its path and, if it runs a model, headers."""
    in_path = [
        {"name": name, "in": "path", "required": True, **build_path_parameter(name, model_ids)}
        for name in PARAMETER.findall(route)
    ]
    if not operation.runs_model:
        return in_path
    return in_path + [
        {
            "name": header,
            "in": "header",
            "description": OPTIONS[header],
            "schema": HEADER_SCHEMAS.get(key, {"type": "string", "enum": FLAGS}),
        }
        for header, key in OPTION_HEADERS.items()
    ]


def build_path_parameter(name: str, model_ids: Sequence[str]) -> dict[str, Any]:
    if name == "task":
        return {"schema": {"type": "string", "enum": list(list_task_names())}}
    schema = {"type": "string", "minLength": 1}
    if name != "id":
        return {"schema": schema}
    return {
        "description": "Id of a model. Slashes may be encoded as `%2F`.",
        "schema": schema,
        "examples": {model_id: {"value": model_id} for model_id in model_ids},
    }


def build_responses(operation: Operation, components: Components) -> dict[str, Any]:
    """Build the responses of status 200 and of `other_responses`."""
    schemas = {operation.media_type: operation.response, EVENTS: operation.events}
    good: dict[str, Any] = {
        "description": HTTPStatus.OK.phrase,
        "content": {
            kind: {"schema": response_schema(schema, operation, kind, components)}
            for kind, schema in schemas.items()
            if schema is not None
        },
    }
    if operation.headers:
        good["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in operation.headers.items()
        }
    others = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status, schema in operation.other_responses.items()
    }
    return {"200": good, **others}


def response_schema(
    schema: JsonSchema, operation: Operation, media_type: str, components: Components
) -> JsonSchema:
    """Return the schema of a body: inline if it has only a `type`, else a named component.

    The schema of a stream is an object whose `data` is JSON text with the named component.
    """
    if schema.keys() <= {"type"}:
        return schema
    if media_type != EVENTS:
        return components.add_schema(f"{to_pascal_case(operation.summary)}Answer", schema)
    named = components.add_schema(f"{to_pascal_case(operation.summary)}Event", schema)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": named}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def error_responses(
    operation: Operation, route: str, error_formats: Sequence[ErrorFormat], components: Components
) -> dict[str, Any]:
    """Build the error responses by status, with one example per error code.

    Omit statuses that `other_responses` of the operation describes.
    """
    possible: tuple[ServeError, ...] = BODY_ERRORS if operation.body is not None else ()
    if operation.access is not Access.PUBLIC:
        possible = (*KEY_ERRORS, *possible)
    if operation.changes_models:
        possible = (*possible, *MANAGEMENT_ERRORS)
    if "{id" in route:
        possible = (*possible, *(error for error in MODEL_ERRORS if error not in possible))
    schemas = [
        components.add_schema(f"{to_pascal_case(f.name)}Error", infer_error_schema(f))
        for f in error_formats
    ]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    responses: dict[str, Any] = {}
    for error_format in error_formats:
        for error in possible:
            add_error_response(responses, error, error_format.respond(error), schema)
    return {s: r for s, r in responses.items() if int(s) not in operation.other_responses}


def add_error_response(
    responses: dict[str, Any], error: ServeError, response: Response, schema: JsonSchema
) -> None:
    """Add `error` to `responses`, as an example of its HTTP status."""
    kind = response.headers["content-type"]
    documented = responses.setdefault(
        str(response.status_code),
        {
            "description": HTTPStatus(response.status_code).phrase,
            "content": {kind: {"schema": schema, "examples": {}}},
        },
    )
    if "retry-after" in response.headers:
        documented["headers"] = {
            "retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    examples = documented["content"][kind]["examples"]
    examples.setdefault(error.code, {"value": orjson.loads(bytes(response.body))})


def infer_error_schema(error_format: ErrorFormat) -> JsonSchema:
    """Infer the schema of the errors of a format from the examples in BODY_ERRORS."""
    return infer_schema(
        [orjson.loads(bytes(error_format.respond(error).body)) for error in BODY_ERRORS]
    )


def to_openapi_path(route: str) -> str:
    """Convert `/models/{id:path}` to `/models/{id}`."""
    return PARAMETER.sub(r"{\1}", route)


def to_pascal_case(text: str) -> str:
    """Convert `/v1/models` and `v1 models` to `V1Models`."""
    return "".join(word[:1].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", text))
