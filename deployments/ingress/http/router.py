"""Routes of all operations, and a table that caches the route of a path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.routing import compile_path

from deployments.ingress.http.api import ApiRoutes, ErrorFormat, Operation, find_client_format

# Limits of the route cache. Clients use one or two paths per model, but scanners try many paths.
MAX_CACHED_ROUTES = 1024
MAX_CACHED_PATH_CHARS = 256


class OperationRoute:
    """One path of an operation, with the error formats of the operation or its API."""

    def __init__(
        self, path: str, operation: Operation, error_formats: Sequence[ErrorFormat]
    ) -> None:
        self.path = path
        self.operation = operation
        self.methods = frozenset(
            {"GET", "HEAD"} if operation.method == "GET" else {operation.method}
        )
        self.error_formats = error_formats  # not empty
        pattern, _, self._converters = compile_path(path)
        # A model id may contain a line break, which `.` does not match by default.
        self._pattern = re.compile(pattern.pattern, re.DOTALL)

    def match(self, path: str) -> dict[str, Any] | None:
        """Return the parameters in `path`; None if the pattern of this route does not match."""
        # `match` would ignore a line break at the end, which no rule of HAProxy for a path ignores.
        found = self._pattern.fullmatch(path)
        if found is None:
            return None
        return {
            name: self._converters[name].convert(text) for name, text in found.groupdict().items()
        }

    def select_error_format(self, headers: Mapping[str, str]) -> ErrorFormat:
        return find_client_format(self.error_formats, headers) or self.error_formats[0]


class MatchedRoute(NamedTuple):
    route: OperationRoute
    path_params: Mapping[str, Any]


def build_routes(apis: Iterable[ApiRoutes]) -> list[OperationRoute]:
    """Build one route per path, in the order of the APIs and of their operations."""
    return [
        OperationRoute(path, operation, operation.error_formats or (api.error_format,))
        for api in apis
        for operation in api.operations()
        for path in operation.paths
    ]


class WrongMethod(Exception):
    """Error: the path exists only for other methods. `route` is the longest matching route."""

    def __init__(self, route: OperationRoute, allowed: frozenset[str]) -> None:
        super().__init__(route.path)
        self.route = route
        self.allowed = allowed


class RouteTable:
    """All routes. The first route that matches a request handles it.

    Matched routes are cached, because trying all patterns takes longer than answering from the
    response cache.
    """

    def __init__(self, routes: Sequence[OperationRoute]) -> None:
        self.routes = routes
        self._cached: dict[tuple[str, str], MatchedRoute] = {}

    def find(self, method: str, path: str) -> MatchedRoute | None:
        """Return the route of a request, or None. Raises WrongMethod."""
        key = (method, path)
        if (cached := self._cached.get(key)) is not None:
            return cached
        matches = [
            MatchedRoute(route, params)
            for route in self.routes
            if (params := route.match(path)) is not None
        ]
        for match in matches:
            if method in match.route.methods:
                self._remember(key, match)
                return match
        if matches:
            allowed = frozenset().union(*(match.route.methods for match in matches))
            # Report the longest route, which is the most specific. A shorter route, such as
            # `DELETE /models/{id:path}`, also matches paths of other APIs.
            longest = max(matches, key=lambda match: len(match.route.path))
            raise WrongMethod(longest.route, allowed)
        return None

    def find_neighbors(self, path: str) -> list[OperationRoute]:
        """Return the routes without parameters that a client of `path` may mean.

        A base URL may lack `/v1`, or have it twice. Otherwise return all routes below the first
        segment of `path`, such as `/v2`.
        """
        routes = [route for route in self.routes if "{" not in route.path]
        if meant := [r for r in routes if r.path == f"/v1{path}" or path == f"/v1{r.path}"]:
            return meant
        prefix = f"/{path.lstrip('/').partition('/')[0]}/"
        return [route for route in routes if route.path.startswith(prefix)]

    def _remember(self, key: tuple[str, str], match: MatchedRoute) -> None:
        if len(key[1]) <= MAX_CACHED_PATH_CHARS:
            if len(self._cached) >= MAX_CACHED_ROUTES:
                self._cached.clear()
            self._cached[key] = match
