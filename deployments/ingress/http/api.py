"""Finding the route of a path, without trying sixty patterns for each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from deployments.errors import ServeError
from deployments.tasks.inputs import JsonSchema, validation_error

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
    response: JsonSchema | None = field(default_factory=dict)  # of status 200; empty: any JSON
    media_type: str = "application/json"  # of status 200
    events: JsonSchema | None = None  # of each event, where status 200 may be, or is, a stream
    # Bodies that the demo models answer, by a name for each.
    examples: Mapping[str, Any] = field(default_factory=dict)
    runs_model: bool = False  # a model computes: the headers of `options` are read
    headers: Mapping[str, str] = field(default_factory=dict)  # of status 200, described
    other_responses: Mapping[int, JsonSchema] = field(
        default_factory=dict
    )  # other statuses, not as errors
    hidden: bool = False  # served, not documented


class ApiRoutes(Protocol):
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


ERROR_FORMAT_KEY = "hundredfold.family"


def use_error_format(request: Request, family: ApiRoutes) -> None:
    """Tell what goes wrong from here on in the words of `family`, whoever owns the path."""
    request.scope[ERROR_FORMAT_KEY] = family


def schema_of(kind: Any) -> JsonSchema:
    """The JSON schema of a type: a pydantic model, or what such models are made of."""
    return TypeAdapter(kind).json_schema()


def parse_body(kind: type[B], body: Any) -> B:
    """`body` as `kind`. Raises InvalidField or EmptyInput naming the key at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise validation_error("", exc.errors(include_url=False)[0]) from None


# Clients ask few paths: one or two for each model. Strangers may try many more.
_MOST_REMEMBERED = 1024
_LONGEST_REMEMBERED = 256  # characters

_Found = tuple[BaseRoute, Scope]


class CachingRouter(Router):
    """Starlette's router, which remembers the routes of paths that had one.

    Trying the patterns one by one costs a microsecond or two each, in sum more than an answer
    from the response cache. Ray Serve would try them all once more, for the `route` of its own
    metrics: so `routes` is empty, and that label is the application's prefix.
    """

    def __init__(self, routes: Sequence[BaseRoute], lifespan: Lifespan[Starlette]) -> None:
        super().__init__(lifespan=lifespan, redirect_slashes=False)
        self.table = Router(routes, redirect_slashes=False)
        self._remembered: dict[tuple[str, str, str], _Found] = {}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or leave it to Starlette when no route fits."""
        if scope["type"] != "http":  # the lifespan, which is this router's
            await super().app(scope, receive, send)
            return
        found = self._find(scope)
        if found is None:
            if methods := self._other_methods(scope):
                raise HTTPException(405, headers={"allow": ", ".join(sorted(methods))})
            await self.table.app(scope, receive, send)
            return
        route, child_scope = found
        scope.update(child_scope, router=self, route=route)
        await route.handle(scope, receive, send)

    def _other_methods(self, scope: Scope) -> set[str]:
        """Those that the path is served with; Starlette tells only the first fitting route's."""
        routes = (route for route in self.table.routes if isinstance(route, Route))
        fitting = (route for route in routes if route.matches(scope)[0] is Match.PARTIAL)
        return {method for route in fitting for method in route.methods or ()}

    def _find(self, scope: Scope) -> _Found | None:
        remembered = self._remembered
        key = (scope["method"], scope["path"], scope.get("root_path", ""))
        if (found := remembered.get(key)) is not None:
            return found
        for route in self.table.routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                if len(scope["path"]) <= _LONGEST_REMEMBERED:
                    if len(remembered) >= _MOST_REMEMBERED:
                        remembered.clear()
                    remembered[key] = route, child_scope
                return route, child_scope
        return None
