"""Errors as text-generation-inference tells them: `error_type` in lower case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from deployments.errors import (
    ArtifactError,
    BadSetting,
    DeadlineExceeded,
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

VALIDATION, GENERATION = "validation", "generation"
INCOMPLETE, OVERLOADED = "incomplete_generation", "overloaded"

# Status and `error_type` by kind of error; others keep their status. These four types are all that
# huggingface_hub has exceptions for.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    # Of all statuses only this one makes huggingface_hub try again without what was not known.
    UnknownParameter: (400, VALIDATION),
    EmptyInput: (422, VALIDATION),
    InvalidField: (422, VALIDATION),
    UnknownToken: (422, VALIDATION),
    InputTooLong: (422, VALIDATION),
    TooManyItems: (422, VALIDATION),
    HardwareUnavailable: (422, VALIDATION),
    WrongTask: (424, GENERATION),
    EngineFailed: (424, GENERATION),
    Overloaded: (429, OVERLOADED),
    ModelLoading: (503, OVERLOADED),
    ArtifactError: (503, GENERATION),
    DeadlineExceeded: (504, INCOMPLETE),
    BadSetting: (500, GENERATION),
}


def words_of(error: ServeError) -> tuple[int, dict[str, Any]]:
    """Status and body; the body is also an event of its own in the middle of a stream."""
    status, kind = status_and_type(error, ERRORS, refused=VALIDATION, failed=INCOMPLETE)
    body: dict[str, Any] = {"error": error.message, "error_type": kind, "code": error.code}
    if isinstance(error, ModelLoading):
        body["estimated_time"] = error.estimated_time_s
    return status, body


def tgi_error(error: ServeError) -> Response:
    """The error as an answer of its own."""
    status, body = words_of(error)
    return json_response(body, status=status, headers=retry_headers(error))
