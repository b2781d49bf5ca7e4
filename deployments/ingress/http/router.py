"""Routes of all operations, and a router that caches the route of a path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from deployments.ingress.http.api import ERROR_FORMAT_KEY, ApiRoutes, ErrorFormat, Handler

# Clients use one or two paths per model; scanners may try many more.
MAX_CACHED_ROUTES = 1024
MAX_CACHED_PATH_CHARS = 256

_Resolved = tuple[BaseRoute, Scope]


class OperationRoute(Route):
    """A route that knows the error format of its operation."""

    def __init__(self, path: str, handler: Handler, method: str, error_format: ErrorFormat) -> None:
        super().__init__(path, handler, methods=[method])
        # A model id may contain a line break, which `.` does not match by default.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)
        self.error_format = error_format


def build_routes(apis: Iterable[ApiRoutes]) -> list[OperationRoute]:
    """Build one route per path, in the order of the APIs and of their operations."""
    return [
        OperationRoute(
            path,
            operation.handler,
            operation.method,
            (*operation.error_formats, api.error_format)[0],
        )
        for api in apis
        for operation in api.operations()
        for path in operation.paths
    ]


class CachingRouter(Router):
    """Caches the matched route of each path.

    Matching sixty patterns one by one takes longer than a response from the cache. Ray Serve would
    match them again for the `route` label of its metrics; `routes` is empty to avoid that, so the
    label is the application's prefix.
    """

    def __init__(self, routes: Sequence[BaseRoute], lifespan: Lifespan[Starlette]) -> None:
        super().__init__(lifespan=lifespan, redirect_slashes=False)
        self.table = Router(routes, redirect_slashes=False)
        self._cached: dict[tuple[str, str, str], _Resolved] = {}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises HTTPException 404 or 405 if no route matches."""
        if scope["type"] != "http":  # the lifespan
            await super().app(scope, receive, send)
            return
        resolved = self._resolve(scope)
        if resolved is None:
            raise self._unmatched_error(scope)
        route, child_scope = resolved
        scope.update(child_scope, router=self, route=route)
        _set_error_format(scope, route)
        await route.handle(scope, receive, send)

    def _unmatched_error(self, scope: Scope) -> HTTPException:
        """Build the error with the methods of all routes of the path."""
        partial = [
            route
            for route in self.table.routes
            if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL
        ]
        if not partial:
            return HTTPException(404)
        _set_error_format(scope, partial[0])
        methods: set[str] = reduce(set.union, (route.methods or set() for route in partial), set())
        return HTTPException(405, headers={"allow": ", ".join(sorted(methods))})

    def _resolve(self, scope: Scope) -> _Resolved | None:
        key = (scope["method"], scope["path"], scope.get("root_path", ""))
        if (cached := self._cached.get(key)) is not None:
            return cached
        for route in self.table.routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                if len(scope["path"]) <= MAX_CACHED_PATH_CHARS:
                    if len(self._cached) >= MAX_CACHED_ROUTES:
                        self._cached.clear()
                    self._cached[key] = route, child_scope
                return route, child_scope
        return None


def _set_error_format(scope: Scope, route: BaseRoute) -> None:
    if isinstance(route, OperationRoute):
        scope[ERROR_FORMAT_KEY] = route.error_format
