"""Error responses in the default format, and response headers for errors in every format."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from deployments.errors import (
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
)
from deployments.ingress.http.api import ERROR_FORMAT_KEY, ErrorFormat
from deployments.ingress.http.bodies import BODY_KEY, json_response
from deployments.ingress.http.current_request import current_request
from deployments.request_headers import REFUSAL_HEADER

log = logging.getLogger("ray.serve.hundredfold")

RecordRejection = Callable[[ServeError, float], None]

# Body keys that set a deadline or a priority, in `options` or in `parameters` of the /v2 API. In
# gRPC's messages, the length of a key precedes it.
QUEUE_KEYS = (
    *(b'"deadline_ms"', b'"priority"', b'"timeout"'),
    *(b"\x0bdeadline_ms", b"\x08priority", b"\x07timeout"),
)


def retry_headers(error: ServeError) -> dict[str, str]:
    """Build `Retry-After` in whole seconds, rounded up, because an earlier retry is refused again.

    An error without `retry_after_s` gets no header.
    """
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def mark_queue_refusal(response: Response, error: ServeError, scope: Scope) -> None:
    """Mark a 429 of a replica's queue. HAProxy then refuses later requests with equal headers.

    A 429 of another limit, such as the bytes of large answers, gets no mark, because the next
    request may succeed.

    A body that sets a deadline or a priority prevents the mark. HAProxy does not read bodies, so it
    would also refuse requests with later deadlines. Searching the body costs less than parsing it
    again. The search also finds an input text that equals a key of QUEUE_KEYS. The 429 then lacks
    the mark, and HAProxy passes on more requests than necessary.
    """
    if not (isinstance(error, Overloaded) and error.from_queue):
        return
    body: bytes = scope.get(BODY_KEY, b"")
    if not any(key in body for key in QUEUE_KEYS):
        response.headers[REFUSAL_HEADER] = "1"


def default_error_response(error: ServeError) -> Response:
    """Build the error object of Hugging Face's hosted Inference API.

    `error` is a string, or a list with one string for an invalid field.
    """
    body: dict[str, Any] = {"error": error.message, "code": error.code}
    if isinstance(error, InvalidField):
        body["error"] = [error.message]
    if error.field is not None:
        body["field"] = error.field
    if isinstance(error, ModelLoading) and error.estimated_time_s is not None:
        body["estimated_time"] = error.estimated_time_s
    if error.status == 429:
        body["error_type"] = "overloaded"
    return json_response(body, status=error.status, headers=retry_headers(error))


DEFAULT_ERROR_FORMAT = ErrorFormat("Hugging Face", default_error_response)


def select_response_status(error: ServeError) -> int:
    """Return the status with which the API of the current request answers `error`."""
    request = current_request()
    scope = {} if request is None else request.scope
    error_format: ErrorFormat = scope.get(ERROR_FORMAT_KEY, DEFAULT_ERROR_FORMAT)
    return error_format.select_status(error)
