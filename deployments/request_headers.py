"""Names of the HTTP headers that the ingress reads, and of one that it writes for HAProxy."""

from __future__ import annotations

# Headers with an API key: of most clients; of Anthropic's clients and many gateways; of Azure's
# clients.
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
# The timeout of OpenAI's clients in s; the first header is sent by Python, the second by
# JavaScript. They send their default too, so any other deadline of the request wins.
SDK_TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Marks the refusal of a request because of a queue. HAProxy counts and removes it (cluster/edge).
REFUSAL_HEADER = "x-queue-refusal"
