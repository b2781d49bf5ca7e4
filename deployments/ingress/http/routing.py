"""Finding the route of a path, without trying sixty patterns for each request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

# Clients ask few paths: one or two for each model. Strangers may try many more.
_MOST_REMEMBERED = 1024
_LONGEST_REMEMBERED = 256  # characters

_Found = tuple[BaseRoute, Scope]


class RememberingRouter(Router):
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
