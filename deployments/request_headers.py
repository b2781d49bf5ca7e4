"""Names of the HTTP headers that the ingress reads, and of one that it writes for HAProxy."""

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
# Headers with the timeout of OpenAI's clients in seconds. The Python client sends the first, the
# JavaScript client the second. Both also send their default timeout, so any other deadline of the
# request has priority.
SDK_TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Marks the refusal of a request because of a queue. HAProxy counts and removes it (cluster/edge).
REFUSAL_HEADER = "x-queue-refusal"
