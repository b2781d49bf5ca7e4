"""What an API family is: routes that are served and documented from one description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.tasks.inputs import JsonSchema, refusal

B = TypeVar("B", bound=BaseModel)
# For bodies whose clients send more than is named: those keys are not for us.
LENIENT = ConfigDict(frozen=True, extra="ignore", strict=True)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing a client can do, at one path or at several that mean the same."""

    method: Literal["GET", "POST"]
    paths: tuple[str, ...]  # as Starlette writes them: `/models/{id:path}/info`
    handler: Handler
    summary: str
    body: JsonSchema | None = None  # None: no body is read
    answer: JsonSchema | None = field(default_factory=dict)  # of status 200; empty: any JSON
    media_type: str = "application/json"  # of status 200
    events: JsonSchema | None = None  # of each event, where status 200 may be, or is, a stream
    # Bodies that the demo models answer, by a name for each.
    examples: Mapping[str, Any] = field(default_factory=dict)
    infers: bool = False  # a model computes: the headers of `options` are read
    headers: Mapping[str, str] = field(default_factory=dict)  # of status 200, described
    also: Mapping[int, JsonSchema] = field(default_factory=dict)  # other statuses, not as errors
    hidden: bool = False  # served, not documented


class Family(Protocol):
    """The routes of one API, and the words its clients expect errors in."""

    name: ClassVar[str]

    def operations(self) -> Sequence[Operation]:
        """Every route; a path that also matches another's stands after it."""
        ...

    def owns(self, path: str) -> bool:
        """Whether errors at `path` are told in this family's words."""
        ...

    def error_response(self, error: ServeError) -> Response:
        """The error as this API's clients read it."""
        ...


SPEAKER = "hundredfold.family"


def errors_told_by(request: Request, family: Family) -> None:
    """Tell what goes wrong from here on in the words of `family`, whoever owns the path."""
    request.scope[SPEAKER] = family


def schema_of(kind: Any) -> JsonSchema:
    """The JSON schema of a type: a pydantic model, or what such models are made of."""
    return TypeAdapter(kind).json_schema()


def parse_body(kind: type[B], body: Any) -> B:
    """`body` as `kind`. Raises InvalidField or EmptyInput naming the key at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise refusal("", exc.errors(include_url=False)[0]) from None
