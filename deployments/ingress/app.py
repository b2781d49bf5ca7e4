"""The table of all APIs, and the assembly of the ASGI application that serves them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request

from deployments.errors import ServeError, missing_model
from deployments.host.idle_cores import IdleCores
from deployments.ingress.apis.anthropic.routes import AnthropicRoutes
from deployments.ingress.apis.cohere.routes import CohereRoutes
from deployments.ingress.apis.documentation.routes import DocumentationRoutes
from deployments.ingress.apis.huggingface.routes import HuggingFaceRoutes
from deployments.ingress.apis.management.routes import ManagementRoutes
from deployments.ingress.apis.model_lists.routes import ModelListRoutes
from deployments.ingress.apis.open_inference.grpc_routes import GrpcInferenceRoutes
from deployments.ingress.apis.open_inference.routes import OpenInferenceRoutes
from deployments.ingress.apis.openai.routes import OpenAIRoutes
from deployments.ingress.apis.openai_responses.routes import ResponsesRoutes
from deployments.ingress.apis.operations.routes import OperationsRoutes
from deployments.ingress.apis.playground.routes import PlaygroundRoutes
from deployments.ingress.apis.rerank.routes import RerankRoutes
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.text_embeddings.routes import TextEmbeddingsRoutes
from deployments.ingress.apis.text_generation.routes import TextGenerationRoutes
from deployments.ingress.apis.tokenizer.routes import TokenizerRoutes
from deployments.ingress.arrivals import CURRENT_ARRIVAL_S
from deployments.ingress.http.api import ApiRoutes
from deployments.ingress.http.application import HttpApplication, ServerHooks
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.gate import AccessGate
from deployments.ingress.http.large_responses import LargeResponseSender
from deployments.ingress.http.request_fields import waits_for_model
from deployments.ingress.http.router import RouteTable, build_routes
from deployments.ingress.http.tracing import RequestTracing
from deployments.ingress.request_log import write_record

# All APIs except the documentation, which `build_apis` builds from this list. To add an API, write
# its package and add a line here. If routes of two APIs match a request, the API that is listed
# first handles it. APIs with broad routes, such as `/models/{id}`, therefore come last.
APIS: tuple[Callable[[ApiContext], ApiRoutes], ...] = (
    PlaygroundRoutes,
    OperationsRoutes,
    OpenInferenceRoutes,
    GrpcInferenceRoutes,
    ResponsesRoutes,  # before `DELETE /models/{id}`, which would match its paths
    ManagementRoutes,
    RerankRoutes,
    CohereRoutes,
    TextEmbeddingsRoutes,
    TokenizerRoutes,
    OpenAIRoutes,
    ModelListRoutes,
    AnthropicRoutes,
    TextGenerationRoutes,
    HuggingFaceRoutes,
)


def build_http_app(
    context: ApiContext,
    gate: AccessGate,
    cors: Cors,
    tracing: RequestTracing,
    idle_cores: IdleCores,
) -> HttpApplication:
    """Build the application that serves all APIs."""
    pipeline, builds = context.pipeline, context.services.builds

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with pipeline.monitor.refreshing(), builds.running(), tracing.running():
            yield

    async def recover(error: ServeError, request: Request) -> None:
        model_id = missing_model(error)
        if model_id is None:
            raise error
        await builds.wait_for_missing(
            model_id,
            error,
            waits=waits_for_model(request),
            may_pull=gate.may_manage(request.headers),
        )
        # The wait for a build has a limit of its own, `builds.wait_s`, beyond most deadlines.
        CURRENT_ARRIVAL_S.set(time.monotonic())

    return HttpApplication(
        RouteTable(build_routes(build_apis(context))),
        gate,
        cors,
        body_bytes=pipeline.admission.body_bytes,
        large_responses=LargeResponseSender(
            pipeline.admission.response_bytes,
            lambda: pipeline.settings.stream_write_timeout_s,
        ),
        hooks=ServerHooks(
            pipeline.record_rejection,
            lifespan,
            lambda: pipeline.settings.limits.trusted_proxies,
            idle_cores,
            recover,
            tracing.begin,
            write_record,
        ),
    )


def build_apis(context: ApiContext) -> tuple[ApiRoutes, ...]:
    apis = tuple(build_api(context) for build_api in APIS)
    return (DocumentationRoutes(context, apis), *apis)
