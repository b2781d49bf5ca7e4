"""Error format and response headers of text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from deployments.errors import (
    ArtifactError,
    EmptyInput,
    EngineFailed,
    Forbidden,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
    TooManyItems,
    Unauthorized,
    UnknownParameter,
    UnknownToken,
    WrongTask,
)
from deployments.ingress.apis.shared.response_headers import inference_headers
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import retry_headers
from deployments.ingress.http.errors import status_and_type
from deployments.ingress.requests import InferenceResponse

# Status and `error_type` by error class. Other errors keep their status.
ERRORS: Mapping[type[ServeError], tuple[int, str]] = {
    EmptyInput: (400, "Empty"),
    InvalidField: (422, "Validation"),
    UnknownParameter: (422, "Validation"),
    UnknownToken: (422, "Validation"),
    InputTooLong: (422, "Validation"),
    TooManyItems: (422, "Validation"),
    HardwareUnavailable: (422, "Validation"),
    Unauthorized: (401, "Unauthorized"),
    Forbidden: (403, "Forbidden"),
    WrongTask: (424, "Backend"),
    EngineFailed: (424, "Backend"),
    Overloaded: (429, "Overloaded"),
    ModelLoading: (503, "Unhealthy"),
    ArtifactError: (503, "Unhealthy"),
}


def build_tei_error(error: ServeError) -> Response:
    """Build the error response.

    `error_type` is in Title Case, as TEI sends it. TEI's documentation says otherwise.
    """
    status, kind = _status_and_type(error)
    body = {"error": error.message, "error_type": kind, "code": error.code}
    return json_response(body, status=status, headers=retry_headers(error))


def select_tei_status(error: ServeError) -> int:
    return _status_and_type(error)[0]


def _status_and_type(error: ServeError) -> tuple[int, str]:
    return status_and_type(error, ERRORS, refused="Validation", failed="Backend")


TEI_ERROR_FORMAT = ErrorFormat("text-embeddings-inference", build_tei_error, select_tei_status)


def tei_response_headers(response: InferenceResponse) -> dict[str, str]:
    """Build the headers that all APIs share, and TEI's time headers in whole milliseconds."""
    timings = response.result.timings
    times_s = {
        "x-compute-time": response.total_s,
        "x-total-time": response.total_s,
        "x-tokenization-time": timings.tokenize_s,
        "x-queue-time": timings.queue_s,
        "x-inference-time": timings.forward_s,
    }
    times = {name: str(round(seconds * 1e3)) for name, seconds in times_s.items()}
    return {**inference_headers(response), **times}
