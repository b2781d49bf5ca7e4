"""Types with which an API declares its operations, their permissions and its error format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.http.direct_requests import REQUEST_ID_HEADER
from deployments.tasks.inputs import JsonSchema, validation_error

B = TypeVar("B", bound=BaseModel)
# Configuration of body types that ignore unknown keys.
LENIENT = ConfigDict(frozen=True, extra="ignore", strict=True)
Handler = Callable[[Request], Awaitable[Response]]


class Access(StrEnum):
    """Permission that an operation needs. http/gate.py checks the permission."""

    PUBLIC = "public"  # health checks and documentation
    INFER = "infer"  # run models, and read their descriptions
    METRICS = "metrics"  # read metrics and usage
    ADMIN = "admin"  # operate the server


class ErrorFormat(NamedTuple):
    """Conversion of errors to the responses of one API."""

    name: str  # name of the error schema in the OpenAPI document
    respond: Callable[[ServeError], Response]
    # Status of the response, for the metrics. They need it before the response exists.
    select_status: Callable[[ServeError], int] = attrgetter("status")
    # Headers of every response, errors or not, with the id of its request.
    request_id_headers: tuple[bytes, ...] = (REQUEST_ID_HEADER,)
    # Header of this API's clients. It selects this format among those of an operation.
    client_header: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One handler and the paths it serves."""

    method: Literal["GET", "POST", "DELETE"]
    paths: tuple[str, ...]  # in Starlette's syntax: `/models/{id:path}/info`
    handler: Handler
    summary: str
    access: Access
    body: JsonSchema | None = None  # None: no body is read
    response: JsonSchema | None = field(default_factory=dict)  # for status 200; {}: any JSON
    media_type: str = "application/json"  # for status 200
    events: JsonSchema | None = None  # schema of each event, if status 200 can be a stream
    examples: Mapping[str, Any] = field(default_factory=dict)  # bodies for the demo models, by name
    # True: the operation runs a model. Headers may set `options`. A missing model may be built; the
    # handler then runs again.
    runs_model: bool = False
    # True: the operation changes models, their versions or the memory; the log names its key.
    changes_models: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # name to description, for status 200
    other_responses: Mapping[int, JsonSchema] = field(default_factory=dict)  # by status, except 200
    # Errors have the first of these formats whose `client_header` the request has, else the first
    # of all, until the handler calls `use_error_format`. Empty: the format of the API.
    error_formats: tuple[ErrorFormat, ...] = ()
    hidden: bool = False  # served, but not documented


class ApiRoutes(Protocol):
    """The routes of one HTTP API, such as OpenAI's, and the format of its errors."""

    name: ClassVar[str]
    error_format: ClassVar[ErrorFormat]

    def operations(self) -> Sequence[Operation]:
        """Return all operations. If several match a request, the first one handles it."""
        ...


ERROR_FORMAT_KEY = "hundredfold.error_format"


def find_client_format(
    error_formats: Iterable[ErrorFormat], headers: Mapping[str, str]
) -> ErrorFormat | None:
    """Return the first format whose `client_header` is one of `headers`."""
    for error_format in error_formats:
        if error_format.client_header is not None and error_format.client_header in headers:
            return error_format
    return None


def use_error_format(request: Request, error_format: ErrorFormat) -> None:
    """Answer errors of this request in `error_format` from here on."""
    request.scope[ERROR_FORMAT_KEY] = error_format


@cache
def build_schema(kind: Any) -> JsonSchema:
    """Return the JSON schema of a pydantic model or of a type composed of such models.

    All callers share the schema, so they must not change it.
    """
    return TypeAdapter(kind).json_schema()


def parse_body(kind: type[B], body: Any) -> B:
    """Validate `body` as `kind`. Raises InvalidField or EmptyInput with the name of the key."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise validation_error("", exc.errors(include_url=False)[0]) from None
