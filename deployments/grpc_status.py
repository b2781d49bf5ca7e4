"""Statuses of gRPC, as the ingress and HAProxy (cluster/edge) answer them.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from urllib.parse import quote

# Value of `content-type`, whose suffix names the encoding of the messages, such as `+proto`.
GRPC_TYPE = "application/grpc"
STATUS_HEADER = "grpc-status"
# protobuf's packages of the services below.
INFERENCE_PACKAGE = "inference"
HEALTH_PACKAGE = "grpc.health.v1"
# Start of the paths of the Open Inference Protocol's methods.
INFERENCE_SERVICE = f"/{INFERENCE_PACKAGE}.GRPCInferenceService/"
# The methods that the ingress has, without the streams and the management of Triton.
INFERENCE_METHODS = (
    *("ServerLive", "ServerReady", "ServerMetadata"),
    *("ModelReady", "ModelMetadata", "ModelInfer"),
)
# Path of the health check that load balancers and probes of Kubernetes call. `Watch`, a stream of
# its results, is UNIMPLEMENTED. Clients of gRPC then send their calls without watching:
# https://github.com/grpc/proposal/blob/master/A17-client-side-health-checking.md
HEALTH_CHECK = f"/{HEALTH_PACKAGE}.Health/Check"
# Paths of the gRPC methods that the ingress has. HAProxy lets no other calls pass.
GRPC_PATHS = (*(INFERENCE_SERVICE + method for method in INFERENCE_METHODS), HEALTH_CHECK)
# Those of GRPC_PATHS that load balancers and probes call. The ingress answers them at once.
HEALTH_CALLS = (f"{INFERENCE_SERVICE}ServerLive", f"{INFERENCE_SERVICE}ServerReady", HEALTH_CHECK)
# Maximum bytes of `grpc-message`. Clients reject headers of more than 8 KB at random.
MAX_MESSAGE_BYTES = 4_096
# ASCII characters of `grpc-message` that need no escape.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class GrpcStatus(IntEnum):
    """Statuses with the numbers of the protocol."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


# Any other HTTP status below 500 is INVALID_ARGUMENT, any other from 500 on INTERNAL.
_BY_HTTP_STATUS: Mapping[int, GrpcStatus] = {
    401: GrpcStatus.UNAUTHENTICATED,
    403: GrpcStatus.PERMISSION_DENIED,
    404: GrpcStatus.NOT_FOUND,
    405: GrpcStatus.UNIMPLEMENTED,
    408: GrpcStatus.DEADLINE_EXCEEDED,
    413: GrpcStatus.RESOURCE_EXHAUSTED,  # as gRPC's own limits of message sizes
    415: GrpcStatus.UNIMPLEMENTED,  # a compression
    429: GrpcStatus.RESOURCE_EXHAUSTED,
    499: GrpcStatus.CANCELLED,
    502: GrpcStatus.UNAVAILABLE,
    503: GrpcStatus.UNAVAILABLE,
    504: GrpcStatus.DEADLINE_EXCEEDED,
}


def from_http_status(status: int) -> GrpcStatus:
    """Return the gRPC status of an error that has this HTTP status."""
    rest = GrpcStatus.INVALID_ARGUMENT if status < 500 else GrpcStatus.INTERNAL
    return _BY_HTTP_STATUS.get(status, rest)


def build_error_headers(status: GrpcStatus, message: str) -> dict[str, str]:
    """Return the headers of a response without a body that ends a call with an error.

    A message that is too long ends early.
    """
    encoded = quote(message, safe=_PLAIN)
    while len(encoded) > MAX_MESSAGE_BYTES:  # a character has up to twelve bytes
        message = message[: len(message) * MAX_MESSAGE_BYTES // len(encoded)]
        encoded = quote(message, safe=_PLAIN)
    return {
        "content-type": GRPC_TYPE,
        "content-length": "0",
        STATUS_HEADER: str(int(status)),
        "grpc-message": encoded,
    }
