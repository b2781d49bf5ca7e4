"""Responses that end too early."""

from __future__ import annotations

import pytest

from benchmarks.common.wire import CLOSED, parse_response

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
