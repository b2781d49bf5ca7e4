"""Routes without an API, for tests of the application."""

from __future__ import annotations

from typing import Literal

from deployments.ingress.http.api import Access, ErrorFormat, Handler, Operation
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT
from deployments.ingress.http.router import OperationRoute


def build_route(
    path: str,
    handler: Handler,
    method: Literal["GET", "POST"] = "POST",
    error_format: ErrorFormat = DEFAULT_ERROR_FORMAT,
) -> OperationRoute:
    operation = Operation(
        method=method, paths=(path,), handler=handler, summary="For tests", access=Access.PUBLIC
    )
    return OperationRoute(path, operation, (error_format,))
