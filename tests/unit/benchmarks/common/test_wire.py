"""Responses that end too early, and those that are errors."""

from __future__ import annotations

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.wire import CLOSED, parse_response, require_ok

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4"


@pytest.mark.parametrize(
    ("received", "is_cut"),
    [
        (HEAD + b"\r\n\r\nabcd", False),
        (HEAD + b"\r\n\r\nabc", True),
        (HEAD + b"\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nabc", False),  # the length is not known
    ],
)
def test_body_shorter_than_its_length_is_cut(received: bytes, is_cut: bool) -> None:
    answer = parse_response(received)
    assert (answer.status, answer.is_cut) == (200, is_cut)


def test_response_that_ends_in_its_head_has_no_status() -> None:
    assert parse_response(HEAD[:-1]).status == CLOSED


def test_response_other_than_200_is_an_error_with_its_body() -> None:
    assert require_ok(parse_response(HEAD + b"\r\n\r\nabcd"), "GET /x", hint="") == b"abcd"
    busy = parse_response(b"HTTP/1.1 429 Too Many Requests\r\nA: b\r\n\r\nbusy")
    with pytest.raises(BenchmarkError, match="GET /x returned 429: b'busy'"):
        require_ok(busy, "GET /x", hint="retry")
