"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from typing_extensions import TypedDict

from deployments.errors import ServeError
from deployments.ingress.http.events import event_of
from deployments.ingress.http.wording import reworded


class ErrorObject(TypedDict):
    """An error; `param` is the field that is at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEvent(TypedDict):
    """The last event of a stream that failed, and what a request that failed is answered."""

    error: ErrorObject


def error_object(error: ServeError) -> ErrorObject:
    """What an error says, under OpenAI's names."""
    kind = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return {"message": error.message, "type": kind, "param": error.field, "code": error.code}


def error_events(names: Mapping[str, str]) -> Callable[[ServeError], bytes]:
    """What turns an error in the middle of a stream into an event, its fields called by `names`."""

    def told(error: ServeError) -> bytes:
        return event_of(orjson.dumps({"error": error_object(reworded(error, names))}))

    return told
