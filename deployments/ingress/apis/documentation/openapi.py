"""The OpenAPI 3.1 document, built from the operations of every API.

Request and response schemas come from the types that validate. Error examples are built by the
error format of each operation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from deployments import __version__
from deployments.artifacts.types import Device
from deployments.errors import (
    ArtifactMissing,
    BodyTooLarge,
    BodyTooSlow,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    MalformedBody,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownModel,
    UnknownParameter,
    UnsupportedEncoding,
    WrongTask,
)
from deployments.ingress.apis.documentation.components import Components, infer_schema
from deployments.ingress.http.api import ApiRoutes, ErrorFormat, Operation
from deployments.ingress.http.request_options import HEADERS, REQUIRED_WORD
from deployments.tasks import list_task_names
from deployments.tasks.inputs import JsonSchema

_NO_MODEL = UnknownModel("Model org/name does not exist", field="model")
_REFUSED = ArtifactMissing("Model org/name is not usable: nothing was built under this id")
_LOADING = ModelLoading("Model org/name is currently loading", estimated_time_s=20.0)

# Wherever a model is named in the path.
MODEL_ERRORS: tuple[ServeError, ...] = (_NO_MODEL, _REFUSED, _LOADING)

# Wherever a body is read.
BODY_ERRORS: tuple[ServeError, ...] = (
    MalformedBody("the body is not JSON in UTF-8", field="body"),
    InvalidField("Error in `inputs`: field required", field="inputs"),
    EmptyInput("`inputs` is empty", field="inputs"),
    WrongTask("Model org/name cannot do `fill-mask`", field="task"),
    HardwareUnavailable("`gpu` was asked for, and there is none", field="options.use_gpu"),
    _NO_MODEL,
    BodyTooSlow("the body took more than 20 seconds", field="body"),
    BodyTooLarge("the body has more than the 2000000 bytes that are read", field="body"),
    UnsupportedEncoding("this `content-encoding` is not read here", field="content-encoding"),
    UnknownParameter("`parameters.topk` is unknown", field="parameters.topk"),
    TooManyItems("`inputs` has 5000 items; at most 1024 are taken", field="inputs"),
    InputTooLong("`inputs[3]` has 700 tokens, the model reads 512", field="inputs[3]"),
    Overloaded("Model is overloaded"),
    EngineFailed("the engine failed"),
    _REFUSED,
    _LOADING,
    DeadlineExceeded("the request took more than 30 seconds"),
)

DESCRIPTION = """\
One server, several APIs; each is compatible with the clients of the service it is named after.

The `content-type` of requests is not looked at: bodies are JSON in UTF-8. Bodies with
`content-encoding: gzip` or `deflate` are inflated. Of keys that are told twice the last one counts.
Errors are told in the words of the API that was asked.

The schema of a `text/event-stream` is that of each of its events, whose `data` is JSON. OpenAI's
streams end with an event of which it is not: `[DONE]`.\
"""
PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
EVENTS = "text/event-stream"
FLAGS = ["true", "false", "1", "0"]
HEADER_VALUES = {
    "hardware": [device.value for device in Device],
    "use_gpu": [*FLAGS, REQUIRED_WORD],
}
OPTIONS = {
    "x-use-cache": "`false` computes afresh.",
    "x-wait-for-model": "`true` waits for an encoder that is starting, instead of answering 503.",
    "x-use-gpu": (
        "`true` prefers the GPU; without one the CPU computes and the response header "
        "`x-compute-fallback` says so. `required` answers 400 instead."
    ),
    "x-hardware": "The encoder to compute on.",
}


def openapi_document(apis: Sequence[ApiRoutes], model_ids: Sequence[str]) -> dict[str, Any]:
    """The whole document; `model_ids` are named as examples of an id."""
    components = Components()
    paths: dict[str, dict[str, Any]] = {}
    for api in apis:
        for operation in api.operations():
            for route in operation.paths if not operation.hidden else ():
                # As the router does: of two that are the same the first one is served.
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
        "components": {"schemas": components.schemas},
    }


def describe_operation(
    family: ApiRoutes, operation: Operation, route: str, components: Components
) -> dict[str, Any]:
    """What an operation is and reads."""
    told: dict[str, Any] = {
        "operationId": operation.method.lower()
        + (to_pascal_case(to_openapi_path(route)) or "Root"),
        "tags": [family.name],
        "summary": operation.summary,
        "x-access": operation.access.value,
    }
    if operation.body is not None:
        schema = components.add_schema(f"{to_pascal_case(operation.summary)}Body", operation.body)
        content: dict[str, Any] = {"schema": schema}
        if operation.examples:
            content["examples"] = {k: {"value": v} for k, v in operation.examples.items()}
        told["requestBody"] = {"required": True, "content": {"application/json": content}}
    return told


def parameters(operation: Operation, route: str, model_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Parts of the path, and the headers that mean something."""
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
            "schema": {
                "type": "string",
                "enum": list(HEADER_VALUES.get(key, FLAGS)),
            },
        }
        for header, key in HEADERS.items()
    ]


def build_path_parameter(name: str, model_ids: Sequence[str]) -> dict[str, Any]:
    """Description, schema and examples of a part of the path."""
    if name == "task":
        return {"schema": {"type": "string", "enum": list(list_task_names())}}
    schema = {"type": "string", "minLength": 1}
    if name != "id":
        return {"schema": schema}
    return {
        "description": "A model's id. Its slashes may stand as they are, or as `%2F`.",
        "schema": schema,
        "examples": {model_id: {"value": model_id} for model_id in model_ids},
    }


def build_responses(operation: Operation, components: Components) -> dict[str, Any]:
    """What comes back when nothing is wrong, and the operation's own other statuses."""
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
    """The schema of what is answered; one that says something has a name."""
    if schema.keys() <= {"type"}:
        return schema
    if media_type != EVENTS:
        return components.add_schema(f"{to_pascal_case(operation.summary)}Answer", schema)
    add_schema = components.add_schema(f"{to_pascal_case(operation.summary)}Event", schema)
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": add_schema}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def error_responses(
    operation: Operation, route: str, error_formats: Sequence[ErrorFormat], components: Components
) -> dict[str, Any]:
    """Build the error responses by status, with one example per error code."""
    possible: tuple[ServeError, ...] = BODY_ERRORS if operation.body is not None else ()
    if "{id" in route:
        possible = (*possible, *(one for one in MODEL_ERRORS if one not in possible))
    schemas = [
        components.add_schema(f"{to_pascal_case(f.name)}Error", infer_error_schema(f))
        for f in error_formats
    ]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    responses: dict[str, Any] = {}
    for error_format in error_formats:
        for error in possible:
            add_error_response(responses, error, error_format.respond(error), schema)
    return {s: told for s, told in responses.items() if int(s) not in operation.other_responses}


def add_error_response(
    responses: dict[str, Any], error: ServeError, response: Response, schema: JsonSchema
) -> None:
    """Enter what is said of `error` under its status."""
    kind = response.headers["content-type"]
    told = responses.setdefault(
        str(response.status_code),
        {
            "description": HTTPStatus(response.status_code).phrase,
            "content": {kind: {"schema": schema, "examples": {}}},
        },
    )
    if "retry-after" in response.headers:
        told["headers"] = {
            "retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    examples = told["content"][kind]["examples"]
    examples.setdefault(error.code, {"value": orjson.loads(bytes(response.body))})


def infer_error_schema(error_format: ErrorFormat) -> JsonSchema:
    """Infer a schema that fits all errors of a format."""
    return infer_schema(
        [orjson.loads(bytes(error_format.respond(error).body)) for error in BODY_ERRORS]
    )


def to_openapi_path(route: str) -> str:
    """A route as OpenAPI writes it: `/models/{id:path}` as `/models/{id}`."""
    return PARAMETER.sub(r"{\1}", route)


def to_pascal_case(text: str) -> str:
    """`/v1/models` and `v1 models` as `V1Models`."""
    return "".join(word[:1].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", text))
