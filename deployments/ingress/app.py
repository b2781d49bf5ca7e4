"""The ASGI application: families of routes, and errors in each family's own words."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import MethodNotAllowed, ServeError, UnknownRoute
from deployments.ingress.apis.documentation.routes import DocumentationRoutes
from deployments.ingress.apis.huggingface.routes import HuggingFaceRoutes
from deployments.ingress.apis.open_inference.routes import OpenInferenceRoutes
from deployments.ingress.apis.openai.routes import OpenAIRoutes
from deployments.ingress.apis.operations.metrics_text import Scrape
from deployments.ingress.apis.operations.routes import OperationsRoutes
from deployments.ingress.apis.rerank.routes import RerankRoutes
from deployments.ingress.apis.text_embeddings.routes import TextEmbeddingsRoutes
from deployments.ingress.apis.text_generation.routes import TextGenerationRoutes
from deployments.ingress.generation import GenerationService
from deployments.ingress.http.api import ERROR_FORMAT_KEY, ApiRoutes, CachingRouter
from deployments.ingress.http.bodies import SCOPE_KEY, BodyMemoryLimit, BodyReservation
from deployments.ingress.http.errors import truncate_error
from deployments.ingress.service import InferenceService

log = logging.getLogger("ray.serve.hundredfold")


def build_http_app(
    service: InferenceService, generation: GenerationService, gather: Scrape
) -> Starlette:
    """The application over both services; `gather` gives the metrics text."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with service.monitor.refreshing():
            yield

    families = build_apis(service, generation, gather)
    errors = ErrorHandlers(families, service)
    routes = [
        Route(path, operation.handler, methods=[operation.method])
        for family in families
        for operation in family.operations()
        for path in operation.paths
    ]
    app = Starlette(
        exception_handlers={
            ServeError: errors.handle_serve_error,
            HTTPException: errors.handle_http_exception,
            Exception: errors.handle_unexpected,
        },
        middleware=[
            Middleware(StripTrailingSlash),
            Middleware(BodyMemoryLimit, limits=lambda: service.settings.limits),
        ],
    )
    app.router = CachingRouter(routes, lifespan)
    return app


def build_apis(
    service: InferenceService, generation: GenerationService, gather: Scrape
) -> tuple[ApiRoutes, ...]:
    """Every API, the one with the greediest paths and the last word on errors at the end."""
    families = (
        OperationsRoutes(service, gather),
        OpenInferenceRoutes(service),
        RerankRoutes(service),
        TextEmbeddingsRoutes(service),
        OpenAIRoutes(service, generation),
        TextGenerationRoutes(service, generation),
        HuggingFaceRoutes(service, generation),
    )
    return (DocumentationRoutes(service, families), *families)


class StripTrailingSlash:
    """Serves `/path/` as `/path`: clients disagree on it, and some follow no redirects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its path shortened."""
        path = scope.get("path", "")
        if path.endswith("/") and path != "/":
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class ErrorHandlers:
    """Every failure as an answer in the words of the family whose path it is."""

    def __init__(self, families: Sequence[ApiRoutes], service: InferenceService) -> None:
        self._families = families
        self._service = service

    async def handle_serve_error(self, request: Request, error: Exception) -> Response:
        """A failure we have a name for."""
        if not isinstance(error, ServeError):
            raise error
        return self._in_own_words(request, error)

    async def handle_http_exception(self, request: Request, error: Exception) -> Response:
        """What Starlette's router refuses: no such path, or not with this method."""
        path = request.url.path
        if isinstance(error, HTTPException) and error.status_code == 405:
            refused = MethodNotAllowed(f"{request.method} is not possible on {path}")
            response = self._in_own_words(request, refused)
            response.headers.update(error.headers or {})
            return response
        return self._in_own_words(request, UnknownRoute(f"there is nothing at {path}"))

    async def handle_unexpected(self, request: Request, error: Exception) -> Response:
        """Anything else: the trace goes to the log, a fixed sentence to the client."""
        log.error("unexpected failure on %s", request.url.path, exc_info=error)
        failure = ServeError("unexpected failure; the server's log has the details")
        return self._in_own_words(request, failure)

    def _in_own_words(self, request: Request, error: ServeError) -> Response:
        account: BodyReservation | None = request.scope.get(SCOPE_KEY)
        total_s = time.perf_counter() - account.began_s if account else 0.0
        self._service.record_rejection(error, total_s)
        # Bugs are told outside of StripTrailingSlash.
        path = request.url.path.rstrip("/") or "/"
        owner = next(family for family in self._families if family.owns(path))
        family: ApiRoutes = request.scope.get(ERROR_FORMAT_KEY, owner)
        return family.error_response(truncate_error(error))
