"""Refusals that replicas have just made, repeated before tokenization."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

from deployments.deadlines import deadline_after
from deployments.errors import Overloaded, build_overloaded

# Refusals that are kept before those without effect are forgotten.
MAX_KEPT = 1_024


class _RefusedRequest(NamedTuple):
    size: int
    ends_s: float  # predicted end of the request; see deployments.deadlines


class RecentRefusals:
    """The last refusal per queue. Use from one event loop.

    A key of a queue names all that the order of service and the cost depend on, such as model,
    device, priority and client, but for the size: the characters of a request. A replica knows its
    queue, prices and other clients, so it predicts the end of a request. What it refused is refused
    again here, at the cost of a look-up: requests of the same queue that are at least as large and
    have no later deadline than the predicted end.
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
        """Remember a refusal of a replica."""
        if error.needed_s is None:
            return
        if len(self._refusals) >= MAX_KEPT:
            now_s = time.monotonic()
            self._refusals = {
                key: refusal for key, refusal in self._refusals.items() if refusal.ends_s > now_s
            }
        if len(self._refusals) < MAX_KEPT:
            self._refusals[queue] = _RefusedRequest(size, deadline_after(error.needed_s))
