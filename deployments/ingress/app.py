"""The ASGI application: families of routes, and errors in each family's own words."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import MethodNotAllowed, ServeError, UnknownRoute
from deployments.ingress import huggingface, openai
from deployments.ingress.exposition import Gather
from deployments.ingress.huggingface import HuggingFaceRoutes
from deployments.ingress.openai import OpenAIRoutes
from deployments.ingress.operations import OperationsRoutes
from deployments.ingress.service import InferenceService

log = logging.getLogger("ray.serve.hundredfold")


def build_http_app(service: InferenceService, gather: Gather) -> Starlette:
    """The application over `service`; `gather` gives the metrics text."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with service.board.refreshing():
            yield

    return Starlette(
        routes=[
            *OperationsRoutes(service, gather).routes(),
            *OpenAIRoutes(service).routes(),
            *HuggingFaceRoutes(service).routes(),
        ],
        exception_handlers={
            ServeError: answer_error,
            HTTPException: answer_http_exception,
            Exception: answer_bug,
        },
        middleware=[Middleware(WithoutTrailingSlash)],
        lifespan=lifespan,
    )


class WithoutTrailingSlash:
    """Serves `/path/` as `/path`: clients disagree on it, and some follow no redirects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its path shortened."""
        path = scope.get("path", "")
        if path.endswith("/") and path != "/":
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


async def answer_error(request: Request, error: Exception) -> Response:
    """A failure we have a name for."""
    if not isinstance(error, ServeError):
        raise error
    return renderer(request)(error)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette's router refuses: no such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status == 405:
        return renderer(request)(
            MethodNotAllowed(f"{request.method} is not possible on {request.url.path}")
        )
    return renderer(request)(UnknownRoute(f"there is nothing at {request.url.path}"))


async def answer_bug(request: Request, error: Exception) -> Response:
    """Anything else: the trace goes to the log, a fixed sentence to the client."""
    log.error("unexpected failure on %s", request.url.path, exc_info=error)
    return renderer(request)(ServeError("unexpected failure; the server's log has the details"))


def renderer(request: Request) -> Callable[[ServeError], Response]:
    """Which family's words this path speaks."""
    path = request.url.path
    if path.startswith("/v1/") or path.endswith("/embeddings"):
        return openai.error_response
    return huggingface.error_response
