"""Routes of the playground page: GET / for browsers, the files of the page, and model reports.

The page is static: HTML, CSS and modules of JavaScript, served as they are. It calls the same
routes as every other client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from deployments.ingress.apis.playground.model_report import build_model_report
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.page_files import PageFiles, build_policy
from deployments.ingress.http.api import Access, Operation
from deployments.ingress.http.application import route_path
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT
from deployments.ingress.http.request_fields import model_in_path

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
# The page builds its content from DOM nodes. The policy forbids scripts to turn text into markup.
POLICY = build_policy(require_trusted_types_for="'script'")
ASSETS = tuple(sorted(path.name for path in PAGE.iterdir() if path.name != INDEX))


class PlaygroundRoutes:
    """Handlers of the playground page."""

    name: ClassVar = "Playground"
    error_format: ClassVar = DEFAULT_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._files = PageFiles(PAGE, POLICY)

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="GET",
                paths=("/",),
                handler=self.root,
                summary="The page for browsers; health of this process for clients",
                access=Access.PUBLIC,
                response={"type": "object", "properties": {"status": {"const": "ok"}}},
            ),
            Operation(
                method="GET",
                paths=tuple(f"/page/{name}" for name in ASSETS),
                handler=self.asset,
                summary="What the page loads",
                access=Access.PUBLIC,
                hidden=True,
            ),
            Operation(
                method="GET",
                paths=("/models/{id:path}/report",),
                handler=self.report,
                summary="Candidates of a model, and what was measured of them",
                access=Access.INFER,
                response={"type": "object"},
            ),
        )

    async def root(self, request: Request) -> Response:
        """Return the page to browsers, which accept `text/html`. Other clients get a status.

        The addresses in the page are relative to a path with a slash at the end. A route prefix
        may lack this slash, so its path is redirected to the path with the slash.
        """
        headers = {"vary": "accept"}
        if "text/html" in request.headers.get("accept", ""):
            path: str = request.scope["path"]
            if not path.endswith("/"):
                return RedirectResponse(f"{path.rpartition('/')[2]}/", headers=headers)
            return await self._files.respond(INDEX, request, headers=headers)
        return json_response({"status": "ok"}, headers=headers)

    async def asset(self, request: Request) -> Response:
        """Return a file of the page. The path pattern matches only known file names."""
        return await self._files.respond(route_path(request.scope).rpartition("/")[2], request)

    async def report(self, request: Request) -> Response:
        model = self._pipeline.permitted.find(model_in_path(request) or "")
        return json_response(await asyncio.to_thread(build_model_report, model))
