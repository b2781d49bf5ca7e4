from __future__ import annotations

from urllib.parse import unquote

import grpc
import pytest

from deployments import errors
from deployments.errors import ServeError
from deployments.grpc_status import (
    MAX_MESSAGE_BYTES,
    GrpcStatus,
    build_error_headers,
    from_http_status,
)


def test_numbers_are_those_of_grpc() -> None:
    known = {code.name: code.value[0] for code in grpc.StatusCode}
    assert {each.name: int(each) for each in GrpcStatus}.items() <= known.items()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidField, GrpcStatus.INVALID_ARGUMENT),
        (errors.InputTooLong, GrpcStatus.INVALID_ARGUMENT),
        (errors.Unauthorized, GrpcStatus.UNAUTHENTICATED),
        (errors.Forbidden, GrpcStatus.PERMISSION_DENIED),
        (errors.UnknownModel, GrpcStatus.NOT_FOUND),
        (errors.BodyTooLarge, GrpcStatus.RESOURCE_EXHAUSTED),
        (errors.UnsupportedEncoding, GrpcStatus.UNIMPLEMENTED),
        (errors.RateLimited, GrpcStatus.RESOURCE_EXHAUSTED),
        (errors.EngineFailed, GrpcStatus.INTERNAL),
        (errors.ReplicasLost, GrpcStatus.UNAVAILABLE),
        (errors.DeadlineExceeded, GrpcStatus.DEADLINE_EXCEEDED),
    ],
)
def test_errors_have_a_status(kind: type[ServeError], status: GrpcStatus) -> None:
    assert from_http_status(kind.status) is status


def test_messages_are_percent_encoded() -> None:
    headers = build_error_headers(GrpcStatus.NOT_FOUND, "100% of `é`\nare gone")
    assert headers["grpc-message"] == "100%25 of `%C3%A9`%0Aare gone"
    assert headers["grpc-status"] == "5"


@pytest.mark.parametrize("message", ["漢" * 1_000, "a" * 10_000, "\n" * 3_000])
def test_long_messages_end_early(message: str) -> None:
    encoded = build_error_headers(GrpcStatus.NOT_FOUND, message)["grpc-message"]
    assert MAX_MESSAGE_BYTES - 20 < len(encoded) <= MAX_MESSAGE_BYTES
    assert message.startswith(unquote(encoded, errors="strict"))
