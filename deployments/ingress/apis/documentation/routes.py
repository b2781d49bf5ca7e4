"""Routes of the documentation: GET /openapi.json, and GET /docs, which needs no internet access.

The page is Swagger UI 5.35.0, copied unchanged into `swagger_ui/` with its license (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from deployments.ingress.apis.documentation.openapi import openapi_document
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.page_files import PageFiles, build_policy
from deployments.ingress.http.api import Access, ApiRoutes, Operation
from deployments.ingress.http.application import route_path
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT

SWAGGER_UI = ("swagger-ui.css", "swagger-ui-bundle.js")
OWN_FILES = ("start.js",)
PAGE = Path(__file__).parent / "docs_page"
SWAGGER_UI_DIRECTORY = Path(__file__).parent / "swagger_ui"

POLICY = build_policy(style_src="'self' 'unsafe-inline'")  # Swagger UI sets inline styles
ASSET_CACHE_CONTROL = "public, max-age=3600"


class DocumentationRoutes:
    """Handlers of the OpenAPI document and its page. `apis` are all other APIs."""

    name: ClassVar = "Documentation"
    error_format: ClassVar = DEFAULT_ERROR_FORMAT

    def __init__(self, context: ApiContext, apis: Sequence[ApiRoutes]) -> None:
        self._pipeline = context.pipeline
        self._apis = apis
        self._own_files = PageFiles(PAGE, POLICY)
        self._swagger_ui = PageFiles(SWAGGER_UI_DIRECTORY, POLICY)

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="GET",
                paths=("/openapi.json",),
                handler=self.document,
                summary="This document",
                access=Access.PUBLIC,
                response={"type": "object"},
            ),
            Operation(
                method="GET",
                paths=("/docs",),
                handler=self.page,
                summary="This document as a page that sends requests",
                access=Access.PUBLIC,
                response={"type": "string"},
                media_type="text/html",
            ),
            Operation(
                method="GET",
                paths=tuple(f"/docs/{name}" for name in (*SWAGGER_UI, *OWN_FILES)),
                handler=self.asset,
                summary="What the page loads",
                access=Access.PUBLIC,
                hidden=True,
            ),
        )

    async def document(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """Return the HTML page that shows the OpenAPI document.

        The addresses in the page are relative to a path without a slash at the end. A path with
        this slash is therefore redirected.
        """
        if request.scope["path"].endswith("/"):
            return RedirectResponse("../docs")
        return await self._own_files.respond("index.html", request)

    async def asset(self, request: Request) -> Response:
        """Return a file of the page. The path pattern matches only known file names."""
        name = route_path(request.scope).rpartition("/")[2]
        files = self._own_files if name in OWN_FILES else self._swagger_ui
        return await files.respond(name, request, ASSET_CACHE_CONTROL)

    @cached_property
    def _document(self) -> bytes:
        configured = tuple(self._pipeline.permitted.configured)
        return orjson.dumps(openapi_document((self, *self._apis), configured))
