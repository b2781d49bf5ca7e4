"""The responses that HAProxy itself writes: its error files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

RETRY_AFTER_S = 1
# Status -> (code, message) of the responses that HAProxy itself writes.
ERRORS: Mapping[int, tuple[str, str]] = {
    # HTTP/2, and bodies that are malformed after their start. Errors in heads are HAProxy's pages.
    400: ("malformed_request", "the request is not valid HTTP/1.1; HTTP/2 is not supported here"),
    404: ("route_not_found", "nothing is served here; `/metrics` has a port of its own"),
    408: ("request_too_slow", "the request took too long to arrive"),
    429: ("overloaded", "too many requests are in flight; send the request again"),
    502: ("unavailable", "the server ended while it computed this request; send it again"),
    503: ("unavailable", "no server is ready; send the request again"),
    504: ("deadline_exceeded", "the server did not answer in time"),
}
RETRYABLE = {429, 502, 503, 504}


def write_errors(directory: Path) -> dict[int, Path]:
    """Write the responses of ERRORS, in the default error format, as HAProxy's error files."""
    return {status: _write_error(directory, status) for status in ERRORS}


def _write_error(directory: Path, status: int) -> Path:
    code, message = ERRORS[status]
    body = json.dumps({"error": message, "code": code}, separators=(",", ":"))
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-cache",
        # Web pages of any origin may read these answers, or `fetch` would report a lost connection
        # in place of the status. HAProxy does not know `cors.origins`, which changes live in the
        # ingress. The answers are constant, so they tell a page nothing about a client or a model.
        "access-control-allow-origin: *",
        "access-control-expose-headers: *",
        *([f"retry-after: {RETRY_AFTER_S}"] if status in RETRYABLE else []),
    ]
    path = directory / f"{status}.http"
    path.write_bytes("\r\n".join([*head, "", body]).encode())
    return path
