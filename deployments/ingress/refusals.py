"""Refusals that replicas have just made, repeated before tokenization."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

from deployments.deadlines import deadline_after
from deployments.errors import Overloaded, build_overloaded

# Limit of the kept refusals. At the limit, expired refusals are dropped.
MAX_KEPT = 1_024


class _RefusedRequest(NamedTuple):
    size: int
    ends_s: float  # predicted end of the request; see deployments.deadlines


class RecentRefusals:
    """The last refusal per queue. Use from one event loop.

    The key of a queue has everything that determines order of service and cost, except the size:
    model, device, priority, client and so on. The size is the characters of a request. A replica
    predicts the end of a request from its queue, prices and other clients, and may refuse it. This
    class then refuses further requests of the queue that are at least as large and whose deadline
    is not later than the predicted end. It costs one look-up.
    """

    def __init__(self) -> None:
        self._refusals: dict[Hashable, _RefusedRequest] = {}

    def check(self, queue: Hashable, size: int, deadline_s: float) -> None:
        """Raise Overloaded if the queue is known to be too long."""
        refusal = self._refusals.get(queue)
        if refusal is None or size < refusal.size or deadline_s > refusal.ends_s:
            return
        lacking_s = refusal.ends_s - deadline_s
        raise build_overloaded(
            f"The queue is {lacking_s:.1f} s too long for the deadline of the request. "
            "Retry later.",
            lacking_s,
        )

    def note(self, queue: Hashable, size: int, error: Overloaded) -> None:
        """Keep a replica's refusal of a request of `size`."""
        if error.needed_s is None:
            return
        if len(self._refusals) >= MAX_KEPT:
            now_s = time.monotonic()
            self._refusals = {
                key: refusal for key, refusal in self._refusals.items() if refusal.ends_s > now_s
            }
        if len(self._refusals) < MAX_KEPT:
            self._refusals[queue] = _RefusedRequest(size, deadline_after(error.needed_s))
