"""Health of a worker: calls that hang, calls that keep failing, a lost engine.

A model that keeps failing is quarantined: its calls are rejected, except single probes that test
whether it works again. Its replica continues to serve other models.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

from deployments.errors import EngineFailed, EngineLost, ModelUnavailable
from deployments.messages import ModelRef

P = ParamSpec("P")
T = TypeVar("T")

# Seconds after which a running call counts as hanging (`args.hang_timeout_s`). The size of every
# call is limited. A forward pass has at most `max_batch_tokens`, or one text of the model's maximum
# length. A decode step has a prefill chunk and a token per KV slot. grammar_trials.py limits the
# compilation of grammars. The models of docs/performance.md need a fraction of a second per call.
# The configuration linter compares `hang_timeout_s` and `timeout_s`.
HANG_TIMEOUT_S = 10.0
# A call may run longer than `hang_timeout_s`, up to this multiple of its predicted time. The
# predicted time is the size of the call times the pace of the slowest recent call. A long text on a
# slow machine therefore does not count as hanging.
SLOW_FACTOR = 4.0
# Calls below this size (padded tokens of a forward pass) count as calls of this size. Most of their
# time is a fixed cost, so a slow short call does not show the pace of long calls.
MIN_PACE_SIZE = 256
# Limit of every call as a multiple of `hang_timeout_s`. With the defaults it is `timeout_s`, after
# which no caller waits for the answer.
MAX_EXTENSION = 3.0
# Each call that ends multiplies the recorded pace of the slowest call, in seconds per unit of size,
# by this factor. A single stall therefore stops counting after some tens of calls.
PACE_DECAY = 0.95
# Consecutive failed calls after which a model is quarantined. A single error does not show whether
# the engine is broken or an input is bad.
MAX_CONSECUTIVE_FAILURES = 10
# Seconds until the first probe of a quarantined model. Each failed probe doubles the time up to
# MAX_QUARANTINE_S.
MIN_QUARANTINE_S = 1.0
MAX_QUARANTINE_S = 30.0
# Consecutive failed probes (at least half a minute) after which Ray Serve replaces the replica,
# unless another model of the replica works.
MAX_FAILED_PROBES = 5


class WorkerHealth:
    """Running calls and failures of one engine or thread, for health checks. Thread-safe."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._running: dict[int, _RunningCall] = {}
        self._pace_s = 0.0  # seconds per unit of size of the slowest recent call
        self._numbers = itertools.count()
        self._failures = 0  # consecutive failed calls
        self._failing_since_s = 0.0  # time.perf_counter of the first of the consecutive failures
        self._succeeded_s = 0.0  # time.perf_counter of the last success
        self._probe_s = 0.0  # time.perf_counter from which a call may be a probe
        self._is_probing = False
        self.failed_probes = 0  # consecutive failed probes
        self._lost: EngineLost | None = None

    @contextmanager
    def running(self, size: int = 1) -> Iterator[None]:
        """Count the block as a running call, and record its pace at the end.

        `size` is the work of the call, in units that all calls share.
        """
        number = next(self._numbers)
        call = _RunningCall(time.perf_counter(), max(size, MIN_PACE_SIZE))
        self._running[number] = call
        try:
            yield
        finally:
            del self._running[number]
            pace_s = (time.perf_counter() - call.started_s) / call.size
            self._pace_s = max(self._pace_s * PACE_DECAY, pace_s)

    def wrap(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return a function that runs `call` and counts it as a running call."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.running():
                return call(*args, **kwargs)

        return run

    def running_s(self) -> float:
        """Return the age of the oldest running call; 0 if none is running."""
        started_s = [call.started_s for call in list(self._running.values())]
        return time.perf_counter() - min(started_s) if started_s else 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last call failed."""
        return self._failures > 0

    def check_quarantine(self) -> None:
        """Raise ModelUnavailable in quarantine, unless the next call may be a probe."""
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            return
        wait_s = self._probe_s - time.perf_counter()
        if wait_s > 0:
            error = ModelUnavailable(
                f"{self.subject} failed {self._failures} times in a row; it is tried again within "
                f"{wait_s:.0f} s"
            )
            error.retry_after_s = wait_s
            raise error

    def admit(self) -> None:
        """Accept a call, in quarantine as a probe. Raises ModelUnavailable if no probe is due."""
        self.check_quarantine()
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            self._is_probing = True
            self._probe_s = time.perf_counter() + self._quarantine_s()

    def record_success(self) -> None:
        self._succeeded_s = time.perf_counter()
        if self._failures:
            self._failures = self.failed_probes = 0
            self._is_probing = False

    def record_failure(self, error: Exception | None = None) -> None:
        """Count a failed call. After EngineLost the worker stays unhealthy."""
        if self._failures == 0:
            self._failing_since_s = time.perf_counter()
        self._failures += 1
        if isinstance(error, EngineLost):
            self._lost = error
        if self._is_probing:
            self._is_probing = False
            self.failed_probes += 1
        if self._failures == MAX_CONSECUTIVE_FAILURES or self.failed_probes:
            self._probe_s = time.perf_counter() + self._quarantine_s()

    def has_succeeded_since(self, other: WorkerHealth) -> bool:
        """Return whether a call succeeded after `other` began to fail."""
        return self._succeeded_s > other._failing_since_s

    def _quarantine_s(self) -> float:
        return min(MIN_QUARANTINE_S * 2.0**self.failed_probes, MAX_QUARANTINE_S)

    def check(self, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        """Raise EngineFailed if the engine is lost or a call hangs."""
        if self._lost is not None:
            raise EngineLost(self._lost.message)
        now_s = time.perf_counter()
        for call in list(self._running.values()):
            predicted_s = SLOW_FACTOR * self._pace_s * call.size
            limit_s = min(max(hang_timeout_s, predicted_s), MAX_EXTENSION * hang_timeout_s)
            if now_s - call.started_s > limit_s:
                raise EngineFailed(
                    f"{self.subject}: a call has run for {now_s - call.started_s:.0f} s; the limit "
                    f"is {limit_s:.0f} s (`args.hang_timeout_s`)"
                )


class ModelHealths(dict[ModelRef, WorkerHealth]):
    """Health of each model of a replica. That of a failing model outlasts its eviction."""

    def __missing__(self, model: ModelRef) -> WorkerHealth:
        health = self[model] = WorkerHealth(model.id)
        return health

    def forget(self, model: ModelRef) -> None:
        """Forget the health of a closed model, unless it is failing."""
        if model in self and not self[model].is_failing:
            del self[model]


class _RunningCall(NamedTuple):
    started_s: float  # time.perf_counter at the start
    size: int


def check_workers(workers: Iterable[WorkerHealth], hang_timeout_s: float) -> None:
    """Raise EngineFailed if the replica of these workers must be replaced.

    A model that keeps failing is a reason only if no other model of the replica works.
    """
    workers = list(workers)
    for worker in workers:
        worker.check(hang_timeout_s)
    for failing in workers:
        if failing.failed_probes >= MAX_FAILED_PROBES and not any(
            worker.has_succeeded_since(failing) for worker in workers
        ):
            raise EngineFailed(f"{failing.subject}: the last {failing.failed_probes} probes failed")
