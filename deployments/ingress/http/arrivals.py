"""Waits of requests between HAProxy and the ingress, which count against their deadlines.

A busy ingress reads its sockets late. Without the wait, a request would be computed that ends after
its client's deadline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar

from deployments.request_headers import ARRIVAL_HEADER

# Wait of the request that the current task handles, in seconds.
CURRENT_WAIT_S: ContextVar[float] = ContextVar("wait", default=0.0)


def measure_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds since HAProxy forwarded a request; 0 if no HAProxy says when.

    The clock is that of the host, which HAProxy and the ingress share.
    """
    arrived_ms = headers.get(ARRIVAL_HEADER, "")
    return max(time.time() - float(arrived_ms) / 1000, 0.0) if arrived_ms.isdecimal() else 0.0
