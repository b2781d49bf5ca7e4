"""Error responses in the default format, and headers of every format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from deployments.errors import (
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
)
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.bodies import json_response
from deployments.request_headers import REFUSAL_HEADER

log = logging.getLogger("ray.serve.hundredfold")

RecordRejection = Callable[[ServeError, float], None]


def retry_headers(error: ServeError) -> dict[str, str]:
    """Build `Retry-After` in whole seconds for errors that may pass, and mark full queues."""
    if error.retry_after_s is None:
        return {}
    headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
    return {**headers, REFUSAL_HEADER: "1"} if error.code == Overloaded.code else headers


def default_error_response(error: ServeError) -> Response:
    """Build the hosted Inference API's object: `error` is a string, or a list for a bad field."""
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
