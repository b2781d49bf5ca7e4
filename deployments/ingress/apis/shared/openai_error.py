"""OpenAI's error object."""

from __future__ import annotations

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.errors import TRUNCATION_ADVICE, InputTooLong, ServeError

# Error types by status. All other statuses below 500 have the type `invalid_request_error`.
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
LONG_PROMPT_CODE = "context_length_exceeded"  # OpenAI's code


class ErrorObject(TypedDict):
    """An error. `param` is the name of the field."""

    message: str
    type: str
    param: str | None
    code: str


def build_openai_error(error: ServeError, *, for_generation: bool = False) -> ErrorObject:
    """Build the error object.

    Clients recognize prompts that are too long for a generation by LONG_PROMPT_CODE.
    """
    error_type = ERROR_TYPES.get(error.status, "invalid_request_error")
    if error.status >= 500:
        error_type = "server_error"
    message, code = error.message, error.code
    if for_generation and isinstance(error, InputTooLong):
        # Remove the advice to truncate: in this API, generation has no parameter for truncation.
        message, code = message.replace(TRUNCATION_ADVICE, ""), LONG_PROMPT_CODE
    return {"message": message, "type": error_type, "param": error.field, "code": code}
