"""Search for the KV slot that makes a decode step fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from deployments.engines.decoder import Logits
from deployments.errors import EngineLost

log = logging.getLogger("ray.serve.hundredfold")


class IsolatedStep(NamedTuple):
    """Result of a decode step. If a slot makes the step fail, only earlier slots are computed."""

    logits: Logits | None  # [n, V] of slots 0 to n-1; None if n is 0
    failed_slot: int | None = None  # the slot n that made the step fail; None: all worked
    error: Exception | None = None


def decode_isolated(decode: Callable[[int], Logits], slots: int) -> IsolatedStep:
    """Call `decode(slots)`. If it fails twice, find the first slot that makes it fail by bisection.

    `decode(n)` computes slots 0 to n-1. Repeating the call is safe: a step writes only after the
    valid tokens of a slot. Only EngineLost is raised; other errors are in the result.
    """
    error: Exception
    for _ in range(2):
        try:
            return IsolatedStep(decode(slots))
        except EngineLost:
            raise
        except Exception as exc:
            error = exc
            log.warning("a decode step over %d slots failed", slots, exc_info=exc)
    # If all smaller calls succeed, the search ends with decode(slots) again, because both failures
    # may have been temporary.
    computed, failing = 0, slots + 1
    logits: Logits | None = None
    while failing - computed > 1:
        middle = (computed + failing) // 2
        try:
            logits = decode(middle).copy()  # the next call overwrites the result
            computed = middle
        except EngineLost:
            raise
        except Exception as exc:
            failing, error = middle, exc
            log.warning("a decode step over %d slots failed too", middle, exc_info=exc)
    if computed == slots:
        return IsolatedStep(logits)
    return IsolatedStep(logits, failing - 1, error)
