"""The trace of which a request is a part: W3C Trace Context, https://www.w3.org/TR/trace-context/.

`tracestate` is not read: the ingress sends no requests to other servers, which could need it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.datastructures import Headers

from deployments.request_headers import TRACE_HEADER

# The version ff, uppercase digits, and ids of zeros alone are invalid.
_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace_id>[0-9a-f]{32})"
    r"-(?!0{16})(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<later_fields>-.*)?"
)
_SAMPLED = 1  # bit of the flags


class TraceContext(NamedTuple):
    """The span of the sender. Ids are lowercase hexadecimal digits."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits
    is_sampled: bool  # whether the sender records its span


def read_trace_context(headers: Headers) -> TraceContext | None:
    """Return the sender's span; None if `traceparent` is missing, malformed or sent twice."""
    if TRACE_HEADER not in headers:
        return None
    values = headers.getlist(TRACE_HEADER)
    found = _TRACEPARENT.fullmatch(values[0]) if len(values) == 1 else None
    # Only versions after 00 may have more fields.
    if found is None or (found["version"] == "00" and found["later_fields"] is not None):
        return None
    is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return TraceContext(found["trace_id"], found["span_id"], is_sampled)
