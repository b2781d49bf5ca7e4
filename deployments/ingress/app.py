"""The ASGI application: the table of APIs, their routes and their error responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.apis.context import ApiContext, Scrape
from deployments.ingress.apis.documentation.routes import DocumentationRoutes
from deployments.ingress.apis.huggingface.routes import HuggingFaceRoutes
from deployments.ingress.apis.open_inference.routes import OpenInferenceRoutes
from deployments.ingress.apis.openai.routes import OpenAIRoutes
from deployments.ingress.apis.operations.routes import OperationsRoutes
from deployments.ingress.apis.rerank.routes import RerankRoutes
from deployments.ingress.apis.text_embeddings.routes import TextEmbeddingsRoutes
from deployments.ingress.apis.text_generation.routes import TextGenerationRoutes
from deployments.ingress.http.api import ApiRoutes
from deployments.ingress.http.bodies import BodyMemoryLimit
from deployments.ingress.http.error_responses import exception_handlers
from deployments.ingress.http.router import CachingRouter, build_routes
from deployments.ingress.pipeline import RequestPipeline

# Every API but the documentation, which describes the others. To add one, write its package and add
# its line here. Where two routes match a path the earlier one wins, so the last has the broadest.
APIS: tuple[Callable[[ApiContext], ApiRoutes], ...] = (
    OperationsRoutes,
    OpenInferenceRoutes,
    RerankRoutes,
    TextEmbeddingsRoutes,
    OpenAIRoutes,
    TextGenerationRoutes,
    HuggingFaceRoutes,
)


def build_http_app(pipeline: RequestPipeline, scrape_metrics: Scrape) -> Starlette:
    """Build the application over a pipeline; `scrape_metrics` returns the metrics text."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with pipeline.monitor.refreshing():
            yield

    app = Starlette(
        exception_handlers=exception_handlers(pipeline.record_rejection),
        middleware=[
            Middleware(StripTrailingSlash),
            Middleware(BodyMemoryLimit, capacity=pipeline.admission.body_bytes),
        ],
    )
    routes = build_routes(build_apis(ApiContext(pipeline, scrape_metrics)))
    app.router = CachingRouter(routes, lifespan)
    return app


def build_apis(context: ApiContext) -> tuple[ApiRoutes, ...]:
    apis = tuple(build_api(context) for build_api in APIS)
    return (DocumentationRoutes(context, apis), *apis)


class StripTrailingSlash:
    """Serves `/path/` as `/path`: clients disagree on it, and some follow no redirects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path != "/":
            # In place: the handler of unexpected errors reads the error format from this scope.
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)
