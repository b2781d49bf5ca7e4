"""Waits of requests between HAProxy and the ingress, which count against their deadlines.

A busy ingress reads its sockets late. If this wait did not count, the ingress would compute answers
that arrive after the client's deadline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar

from deployments.request_headers import ARRIVAL_HEADER

# Wait of the request that the current task handles, in seconds.
CURRENT_WAIT_S: ContextVar[float] = ContextVar("wait", default=0.0)


def measure_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds since HAProxy forwarded a request; 0 without HAProxy's header.

    HAProxy and the ingress share the clock of their host.
    """
    arrived_ms = headers.get(ARRIVAL_HEADER, "")
    return max(time.time() - float(arrived_ms) / 1000, 0.0) if arrived_ms.isdecimal() else 0.0
