"""Failed loads of models. For a while, calls get the stored error instead of another load."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from deployments.errors import ModelUnavailable, ServeError, hide_details
from deployments.health import MAX_QUARANTINE_S, MIN_QUARANTINE_S
from deployments.messages import ModelRef

log = logging.getLogger("ray.serve.hundredfold")

MAX_FAILURES = 1_000  # limit of the failed loads whose errors are kept


class FailedLoads:
    """Errors of the failed loads of one pool.

    Each further failure of a model doubles the wait for the next try, up to MAX_QUARANTINE_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: OrderedDict[ModelRef, _Failure] = OrderedDict()

    def find(self, ref: ModelRef) -> ServeError | None:
        """Return the error of the model's last load while a new load must wait, else None."""
        failure = self._failures.get(ref)
        # After a lack of memory a call tries again at once: memory may become free at any moment.
        if (
            failure is None
            or isinstance(failure.error, ModelUnavailable)
            or self._has_ended(failure)
        ):
            return None
        return copy.copy(failure.error)  # a shared exception object collects tracebacks

    def delays(self, ref: ModelRef) -> bool:
        """Return whether the next load that no call waits for must wait."""
        failure = self._failures.get(ref)
        return failure is not None and not self._has_ended(failure)

    def add(self, ref: ModelRef, exception: Exception) -> ServeError:
        """Store and log the error of a load. Return the error for clients.

        A lack of memory is logged only once until the model is loaded.
        """
        error = copy.copy(hide_details(exception))  # no traceback, which would keep objects alive
        error.elsewhere = True
        previous = self._failures.pop(ref, None)
        lacks_memory = isinstance(exception, ModelUnavailable)
        if previous is not None and isinstance(previous.error, ModelUnavailable) != lacks_memory:
            previous = None  # a lack of memory and a failure have nothing to do with each other
        if previous is None or not lacks_memory:
            cause = None if isinstance(exception, ServeError) else exception
            log.error("model %s cannot be loaded: %s", ref.name, exception, exc_info=cause)
        wait_s = MIN_QUARANTINE_S if previous is None else 2 * previous.wait_s
        wait_s = min(wait_s, MAX_QUARANTINE_S)
        self._failures[ref] = _Failure(error, wait_s, self._clock() + wait_s)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)
        return error

    def _has_ended(self, failure: _Failure) -> bool:
        return self._clock() >= failure.ends_s

    def forget(self, ref: ModelRef) -> None:
        self._failures.pop(ref, None)


class _Failure(NamedTuple):
    error: ServeError
    wait_s: float
    ends_s: float
