"""What the routes that Cohere's clients call share: the error format, and `meta` of responses."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import ServeError
from deployments.ingress.apis.shared.openai_error import build_openai_error
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.application import route_path
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.error_responses import retry_headers


def cohere_error(error: ServeError) -> Response:
    """Build the error response. Cohere's clients read `message`, other clients `error`."""
    body = {"message": error.message, "error": build_openai_error(error)}
    return json_response(body, status=error.status, headers=retry_headers(error))


COHERE_ERROR_FORMAT = ErrorFormat("Cohere", cohere_error)


def read_api_version(request: Request) -> str:
    """Return the version of Cohere's API that the path names; 1 if it names none."""
    return "2" if route_path(request.scope).rsplit("/", 2)[-2] == "v2" else "1"


def build_cohere_meta(version: str, tokens: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "tokens": {"input_tokens": tokens}}
