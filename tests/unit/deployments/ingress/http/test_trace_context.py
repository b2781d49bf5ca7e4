from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from deployments.ingress.http.trace_context import TraceContext, read_trace_context

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def read(*values: str) -> TraceContext | None:
    raw = [(b"traceparent", value.encode()) for value in values]
    return read_trace_context(Headers(raw=raw))


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (f"00-{TRACE_ID}-{SPAN_ID}-01", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-03", True),  # the second bit: the trace id is random
        (f"00-{TRACE_ID}-{SPAN_ID}-fe", False),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01", True),  # of a later version
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-the-future-adds", True),
    ],
)
def test_span_of_the_sender_is_read(value: str, is_sampled: bool) -> None:
    assert read(value) == TraceContext(TRACE_ID, SPAN_ID, is_sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01-",
        f"cc-{TRACE_ID}-{SPAN_ID}-01.more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"0-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID[1:]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}0-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0x",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00_{TRACE_ID}_{SPAN_ID}_01",
        f"00-{TRACE_ID}-{SPAN_ID}-01,00-{TRACE_ID}-{SPAN_ID}-01",
    ],
)
def test_malformed_header_counts_as_missing(value: str) -> None:
    assert read(value) is None


def test_header_that_is_missing_or_sent_twice_names_no_span() -> None:
    value = f"00-{TRACE_ID}-{SPAN_ID}-01"
    assert read() is None
    assert read(value, value) is None
