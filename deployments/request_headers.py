"""Names of the HTTP headers that the ingress reads, or exchanges with HAProxy (cluster/edge)."""

from __future__ import annotations

# Headers with an API key. Anthropic's clients and many gateways send the second, Azure's clients
# send the third, most other clients send the first.
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
ADDRESS_HEADER = "x-forwarded-for"
# Options by header, for APIs whose bodies have no options.
OPTION_HEADERS = {
    "x-use-cache": "use_cache",
    "x-wait-for-model": "wait_for_model",
    "x-use-gpu": "use_gpu",
    "x-hardware": "hardware",
    "x-compute": "compute",
    "x-request-timeout-ms": "deadline_ms",
    "x-priority": "priority",
}
# Headers with the timeout of OpenAI's and Anthropic's clients in seconds. The Python clients send
# the first, the JavaScript clients the second. They also send their default timeout, so any other
# deadline of the request has priority.
SDK_TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Time limit of a gRPC call: a number and its unit.
GRPC_TIMEOUT_HEADER = "grpc-timeout"
# Header of the response to a request that was refused because a queue is full or too long. HAProxy
# counts and removes the header.
REFUSAL_HEADER = "x-queue-refusal"
# Arrival of a request in milliseconds since the epoch, from the HAProxy of the same host.
ARRIVAL_HEADER = "x-arrival-ms"
# Span of the sender (http/trace_context.py).
TRACE_HEADER = "traceparent"
