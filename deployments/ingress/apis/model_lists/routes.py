"""Routes that list models, in OpenAI's form or in Anthropic's.

GET  /v1/models  /v1/models/{id}  /models/{id}/v1/models
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.apis.anthropic.errors import ANTHROPIC_ERROR_FORMAT, CLIENT_HEADER
from deployments.ingress.apis.anthropic.models import build_anthropic_model, build_anthropic_page
from deployments.ingress.apis.openai.routes import OPENAI_ERROR_FORMAT
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.model_list import (
    ModelPage,
    build_model_facts,
    build_model_list,
    build_openai_page,
    describe_page,
    parse_limit,
)
from deployments.ingress.http.api import Access, Operation
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.request_fields import model_in_path

ANTHROPIC_PAGE_MODELS = 20  # default page length

build_listing_operation = partial(
    Operation,
    method="GET",
    access=Access.INFER,
    response={"type": "object"},
    error_formats=(OPENAI_ERROR_FORMAT, ANTHROPIC_ERROR_FORMAT),
)


class ModelListRoutes:
    name: ClassVar = "Models"
    error_format: ClassVar = OPENAI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._store = context.services.builds.store

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        return (
            build_listing_operation(
                paths=("/v1/models",),
                handler=self.models,
                summary="The models of the store, those of the configuration first",
            ),
            build_listing_operation(
                paths=("/models/{id:path}/v1/models",),
                handler=self.only_model,
                summary="A list of one model, for clients with /models/{id}/v1 as base URL",
            ),
            build_listing_operation(
                paths=("/v1/models/{id:path}",),
                handler=self.model,
                summary="One model",
            ),
        )

    async def models(self, request: Request) -> Response:
        query = request.query_params
        if not _is_anthropic_client(request):
            return json_response(await build_model_list(self._pipeline, self._store, query))
        page = await describe_page(
            self._pipeline,
            self._store,
            parse_limit(query, ANTHROPIC_PAGE_MODELS),
            after=query.get("after_id"),
            before=query.get("before_id"),
        )
        return json_response(build_anthropic_page(page))

    async def only_model(self, request: Request) -> Response:
        model = self._pipeline.permitted.find(model_in_path(request) or "")
        page = ModelPage([build_model_facts(model, self._pipeline.monitor)], has_more=False)
        build_page = build_anthropic_page if _is_anthropic_client(request) else build_openai_page
        return json_response(build_page(page))

    async def model(self, request: Request) -> Response:
        model = self._pipeline.permitted.find(model_in_path(request) or "")
        facts = build_model_facts(model, self._pipeline.monitor)
        return json_response(
            build_anthropic_model(facts) if _is_anthropic_client(request) else facts
        )


def _is_anthropic_client(request: Request) -> bool:
    return CLIENT_HEADER in request.headers
