"""Simulation of one deployment and its queue, in steps of one second.

All replicas share one FIFO queue. A step can serve a fraction of a request. Steps are shorter than
every delay of the autoscaling. Waiting times have an error of at most half a step. After waiting in
the queue, a request spends `PASS_S` in a forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.controller import Controller, ReplicaLoad
from benchmarks.autoscaling.day import Day
from deployments.autoscaling import BUSY, QUEUED_S

PASS_S = 0.03  # assumed duration of a forward pass in s


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Properties of the simulated deployment. Only `window_s` differs between policies."""

    start_s: int = 10  # s from the decision to start a replica until it takes requests
    deadline_s: float = 30.0  # maximum wait; requests that would wait longer are rejected
    # Maximum queue that a replica reports, in s of work; None: no limit. A limit simulates replicas
    # that do not report the requests that wait in the ingress.
    window_s: float | None = None


# Converts the requests in the deployment (their number per model) to the number of calls that Serve
# would count.
CountCalls = Callable[[NDArray[np.float64]], float]


@dataclass(slots=True)
class _Arrivals:
    """Requests that arrived in one second and are still in the queue."""

    second: int
    work: float  # s that one replica needs for all `requests`
    requests: NDArray[np.float64]  # number of requests by model


@dataclass(slots=True)
class Trace:
    """Counts of each second, and the latencies of all served requests."""

    replicas: list[int] = field(default_factory=list)  # number of running replicas
    paid: list[int] = field(default_factory=list)  # number of running or starting replicas
    queued_s: list[float] = field(default_factory=list)  # s of work for one replica
    rejected: list[float] = field(default_factory=list)  # number of rejected requests
    requests: list[float] = field(default_factory=list)  # number of arrived requests
    # One entry per group of requests that arrived in the same second and were served in the same
    # step: second of arrival, latency in s, number of requests.
    latencies: list[tuple[int, float, float]] = field(default_factory=list)
    # The requests of each entry of `latencies`, by model.
    served: list[NDArray[np.float64]] = field(default_factory=list)


class Simulation:
    """One day under one controller. Without a controller the number of replicas is constant."""

    def __init__(
        self,
        day: Day,
        server: ServerSettings,
        controller: Controller | None,
        count_calls: CountCalls,
        replicas: int,
    ) -> None:
        self._day = day
        self._server = server
        self._controller = controller
        self._count_calls = count_calls
        self._ready_at: list[int] = [0] * replicas  # second in which each replica is ready
        self._queue: deque[_Arrivals] = deque()
        self._queued = 0.0  # seconds that one replica would need for the queue
        self._window = 1 if controller is None else round(controller.config.look_back_period_s)
        # One value per second. The controller gets the means over its look-back period.
        self._busy: list[float] = []  # share of their time that the replicas are busy
        self._visible: list[float] = []  # queue that each replica reports, in s of work
        self._calls: list[float] = []  # number of calls of the whole deployment
        self.trace = Trace()

    def run(self) -> Trace:
        for second in range(self._day.requests.shape[1]):
            self.step(second, self._day.requests[:, second].astype(np.float64))
        return self.trace

    def step(self, second: int, requests: NDArray[np.float64]) -> None:
        """Replay one second. `requests` holds the number of arriving requests of each model."""
        running = self.count_running(second)
        self._accept(second, running, requests)
        served = self._serve(second, running)
        self._report(running, served)
        self.trace.replicas.append(running)
        self.trace.paid.append(len(self._ready_at))
        self.trace.queued_s.append(self._queued)
        if self._controller is not None:
            self._resize(second, self._controller.decide(second, self._observe(second)))

    @property
    def queued_s(self) -> float:
        """Seconds that one replica would need for the queue."""
        return self._queued

    def count_running(self, second: int) -> int:
        return sum(ready <= second for ready in self._ready_at)

    def start_s(self, second: int) -> float:
        """Return the seconds until the first replica takes requests; 0 if one already does."""
        ready = min(self._ready_at, default=second + self._server.start_s)
        return float(max(ready - second, 0))

    def _accept(self, second: int, running: int, requests: NDArray[np.float64]) -> None:
        """Queue the requests that the running replicas can serve within the deadline.

        Reject the others. While no replica runs, the limit is that of one replica.
        """
        work = float(self._day.request_s @ requests)
        room = self._server.deadline_s * max(running, 1) + running - self._queued
        accepted = min(max(room / work, 0.0), 1.0) if work else 1.0
        self.trace.requests.append(float(requests.sum()))
        self.trace.rejected.append(float(requests.sum()) * (1 - accepted))
        if work * accepted > 0:
            self._queue.append(_Arrivals(second, work * accepted, requests * accepted))
            self._queued += work * accepted

    def _serve(self, second: int, running: int) -> NDArray[np.float64]:
        """Let `running` replicas work for 1 s. Return the number of served requests by model."""
        served = np.zeros(len(self._day.request_s))
        done = 0.0  # s of work in this step
        while self._queue and done < running:
            first = self._queue[0]
            work = min(first.work, running - done)
            share = work / first.work
            part = first.requests * share
            served += part
            age_s = second - first.second - 0.5 + (done + work / 2) / running
            self.trace.latencies.append((first.second, max(age_s, 0.0) + PASS_S, float(part.sum())))
            self.trace.served.append(part)
            first.work -= work
            first.requests -= part
            done += work
            if share == 1.0:
                self._queue.popleft()
        self._queued = max(self._queued - done, 0.0)
        return served

    def _report(self, running: int, served: NDArray[np.float64]) -> None:
        work = float(self._day.request_s @ served)
        waiting = sum((part.requests for part in self._queue), np.zeros(len(served)))
        self._busy.append(min(work / running, 1.0) if running else 0.0)
        per_replica = self._queued / running if running else 0.0
        window_s = self._server.window_s
        self._visible.append(per_replica if window_s is None else min(per_replica, window_s))
        self._calls.append(self._count_calls(waiting + served * PASS_S))

    def _observe(self, second: int) -> ReplicaLoad:
        """Average the reports of each running replica over the look-back window, as Serve does."""
        ages = [second + 1 - ready for ready in self._ready_at if ready <= second]
        windows = [min(age, self._window) for age in ages]
        metrics = {
            name: {index: _mean(values, window) for index, window in enumerate(windows)}
            for name, values in ((BUSY, self._busy), (QUEUED_S, self._visible))
        }
        # Calls wait in handles only while no replica runs.
        calls = _mean(self._calls, self._window)
        return ReplicaLoad(len(windows), metrics, calls, 0.0 if windows else calls)

    def _resize(self, second: int, target: int) -> None:
        """Start or end replicas to reach `target`. End the youngest replicas first."""
        del self._ready_at[target:]
        self._ready_at += [second + self._server.start_s] * (target - len(self._ready_at))


def _mean(values: list[float], window: int) -> float:
    recent = values[-window:]
    return sum(recent) / len(recent)
