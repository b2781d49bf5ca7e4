"""Arrival times of requests at HAProxy, from which their deadlines count.

A busy ingress reads its sockets late, and bodies may arrive slowly. If these waits did not count,
the ingress would compute answers that arrive after the client's deadline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar

from deployments.request_headers import ARRIVAL_HEADER

# None: the current task handles no request that has arrived over HTTP.
CURRENT_ARRIVAL_S: ContextVar[float | None] = ContextVar("arrival", default=None)


def read_arrival(headers: Mapping[str, str]) -> float:
    """Return when HAProxy forwarded a request (time.monotonic); now without HAProxy's header.

    HAProxy and the ingress share the clock of their host.
    """
    arrived_ms = headers.get(ARRIVAL_HEADER, "")
    wait_s = time.time() - float(arrived_ms) / 1000 if arrived_ms.isdecimal() else 0.0
    return time.monotonic() - max(wait_s, 0.0)


def current_arrival() -> float:
    """Return the arrival of the request that the current task handles (time.monotonic)."""
    arrival_s = CURRENT_ARRIVAL_S.get()
    return time.monotonic() if arrival_s is None else arrival_s
