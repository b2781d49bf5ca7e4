"""Errors of the routes that Cohere's clients call."""

from __future__ import annotations

from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.apis.shared.openai_error import build_openai_error
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import retry_headers


def cohere_error(error: ServeError) -> Response:
    """Build the error response. Cohere's clients read `message`, other clients `error`."""
    body = {"message": error.message, "error": build_openai_error(error)}
    return json_response(body, status=error.status, headers=retry_headers(error))
