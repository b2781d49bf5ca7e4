"""Anthropic's error object."""

from __future__ import annotations

from starlette.responses import Response

from deployments.errors import TRUNCATION_ADVICE, InputTooLong, ServeError
from deployments.ingress.apis.anthropic.schemas import AnthropicError
from deployments.ingress.apis.shared.response_headers import generation_error_headers
from deployments.ingress.http.api import ErrorFormat
from deployments.ingress.http.bodies import json_response
from deployments.ingress.http.current_request import current_request
from deployments.ingress.http.direct_requests import REQUEST_ID_HEADER, REQUEST_ID_KEY
from deployments.ingress.http.errors import replace_status_422

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CLIENT_HEADER = "anthropic-version"  # each request of the SDK has it
LONG_PROMPT = "prompt is too long: "  # clients shorten the conversation if a message starts so


def build_anthropic_error(error: ServeError) -> AnthropicError:
    message = error.message
    if isinstance(error, InputTooLong) and (error.field or "").startswith("messages"):
        # Remove the advice to truncate: this API has no parameter for truncation.
        message = LONG_PROMPT + message.replace(TRUNCATION_ADVICE, "")
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    built = AnthropicError(
        type="error",
        error={
            "type": ERROR_TYPES.get(error.status, default),
            "message": message,
            "details": {"error_code": error.code},
        },
    )
    request = current_request()
    if request is not None and (request_id := request.scope.get(REQUEST_ID_KEY)) is not None:
        built["request_id"] = request_id.decode("latin-1")
    return built


def anthropic_error(error: ServeError) -> Response:
    # Anthropic's API has no 422.
    return json_response(
        build_anthropic_error(error),
        status=replace_status_422(error),
        headers=generation_error_headers(error),
    )


ANTHROPIC_ERROR_FORMAT = ErrorFormat(
    "Anthropic",
    anthropic_error,
    replace_status_422,
    # The SDK reads `request-id` only.
    request_id_headers=(REQUEST_ID_HEADER, b"request-id"),
    client_header=CLIENT_HEADER,
)
