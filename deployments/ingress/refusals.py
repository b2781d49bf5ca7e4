"""Recent refusals of replicas, with which the ingress refuses similar requests at once."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

from deployments.deadlines import deadline_after
from deployments.errors import Overloaded, build_overloaded

# Maximum number of stored refusals. At the limit, expired refusals are dropped. If none has
# expired, refusals of further queues are not stored.
MAX_KEPT = 1_024


class _RefusedRequest(NamedTuple):
    size: int
    ends_s: float  # predicted end of the request, on the monotonic clock


class RecentRefusals:
    """The last refusal per queue. Use from one event loop.

    A replica refuses a request if it predicts that the request ends after its deadline. This class
    then refuses later requests of the same queue before their tokenization. It refuses requests
    that are at least as large as the stored one, if their deadline is not after the predicted end.

    The key of a queue contains everything that determines the order of service and the cost, such
    as model, device, priority and client. It does not contain the size of a request, which is its
    number of characters or its estimated tokens.
    """

    def __init__(self) -> None:
        self._refusals: dict[Hashable, _RefusedRequest] = {}

    def check(self, queue: Hashable, size: int, deadline_s: float) -> None:
        """Raise Overloaded if the stored refusal of the queue applies to this request too."""
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
        """Store the refusal of a request of `size`.

        Do nothing if `error.needed_s`, the predicted time of the request, is unknown.
        """
        if error.needed_s is None:
            return
        if len(self._refusals) >= MAX_KEPT:
            now_s = time.monotonic()
            self._refusals = {
                key: refusal for key, refusal in self._refusals.items() if refusal.ends_s > now_s
            }
        if queue in self._refusals or len(self._refusals) < MAX_KEPT:
            self._refusals[queue] = _RefusedRequest(size, deadline_after(error.needed_s))
