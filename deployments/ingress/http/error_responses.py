"""Error responses: the default format, and handlers that use the format of the matched route."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import (
    InvalidField,
    MethodNotAllowed,
    ModelLoading,
    ServeError,
    UnknownRoute,
)
from deployments.ingress.http.api import ERROR_FORMAT_KEY, ErrorFormat
from deployments.ingress.http.bodies import SCOPE_KEY, BodyReservation, json_response
from deployments.ingress.http.errors import truncate_error

log = logging.getLogger("ray.serve.hundredfold")

RecordRejection = Callable[[ServeError, float], None]


def retry_headers(error: ServeError) -> dict[str, str]:
    """Build `Retry-After` in whole seconds for errors that may pass."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}


def default_error_response(error: ServeError) -> Response:
    """Build the hosted Inference API's object: `error` is a string, or a list for a bad field."""
    body: dict[str, Any] = {"error": error.message, "code": error.code}
    if isinstance(error, InvalidField):
        body["error"] = [error.message]
    if error.field is not None:
        body["field"] = error.field
    if isinstance(error, ModelLoading):
        body["estimated_time"] = error.estimated_time_s
    if error.status == 429:
        body["error_type"] = "overloaded"
    return json_response(body, status=error.status, headers=retry_headers(error))


DEFAULT_ERROR_FORMAT = ErrorFormat("Hugging Face", default_error_response)


def exception_handlers(record_rejection: RecordRejection) -> Mapping[Any, Any]:
    """Build Starlette's handlers; `record_rejection` gets every error and its elapsed seconds."""

    def respond(request: Request, error: ServeError) -> Response:
        body: BodyReservation | None = request.scope.get(SCOPE_KEY)
        record_rejection(error, time.perf_counter() - body.started_s if body else 0.0)
        error_format = request.scope.get(ERROR_FORMAT_KEY, DEFAULT_ERROR_FORMAT)
        response: Response = error_format.respond(truncate_error(error))
        return response

    async def handle_serve_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ServeError):
            raise error
        return respond(request, error)

    async def handle_http_exception(request: Request, error: Exception) -> Response:
        """Convert the router's 404 and 405."""
        path = request.url.path
        if isinstance(error, HTTPException) and error.status_code == 405:
            response = respond(
                request, MethodNotAllowed(f"{path} does not support {request.method}")
            )
            response.headers.update(error.headers or {})
            return response
        return respond(request, UnknownRoute(f"no route matches {path}; see /docs"))

    async def handle_unexpected(request: Request, error: Exception) -> Response:
        """Log the traceback; the client gets no details."""
        log.error("unexpected failure on %s", request.url.path, exc_info=error)
        return respond(request, ServeError("unexpected failure; see the log of the server"))

    return {
        ServeError: handle_serve_error,
        HTTPException: handle_http_exception,
        Exception: handle_unexpected,
    }
