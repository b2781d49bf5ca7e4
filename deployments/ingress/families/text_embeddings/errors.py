"""Errors as text-embeddings-inference tells them."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from deployments.errors import (
    ArtifactError,
    EmptyInput,
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownParameter,
    UnknownToken,
    WrongTask,
)
from deployments.ingress.http.codec import json_response
from deployments.ingress.http.replies import retry_headers
from deployments.ingress.http.wording import status_and_type

# Status and `error_type` by kind of error; others keep their status.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    EmptyInput: (400, "Empty"),
    InvalidField: (422, "Validation"),
    UnknownParameter: (422, "Validation"),
    UnknownToken: (422, "Validation"),
    InputTooLong: (422, "Validation"),
    TooManyItems: (422, "Validation"),
    HardwareUnavailable: (422, "Validation"),
    WrongTask: (424, "Backend"),
    EngineFailed: (424, "Backend"),
    Overloaded: (429, "Overloaded"),
    ModelLoading: (503, "Unhealthy"),
    ArtifactError: (503, "Unhealthy"),
}


def tei_error(error: ServeError) -> Response:
    """`error_type` in Title case, as its server writes it, not as its documents say."""
    status, kind = status_and_type(error, ERRORS, refused="Validation", failed="Backend")
    body = {"error": error.message, "error_type": kind, "code": error.code}
    return json_response(body, status=status, headers=retry_headers(error))
