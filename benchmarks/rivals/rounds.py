"""Rounds of the benchmark: start each rival, measure it and Hundredfold alternately, end it.

A rival is a server of another project. Only two servers run at a time. The server that is not
measured idles, and its CPU time is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import format_number, log_progress
from benchmarks.common.statistics import percentiles_ms
from benchmarks.rivals.answers import AnswerBounds, RawAnswer, check_answers, require_right
from benchmarks.rivals.apis import Api, CompletionApi
from benchmarks.rivals.references import References
from benchmarks.rivals.results import LevelName
from benchmarks.rivals.workloads import TextWorkload
from benchmarks.servers.processes import ServerProcess
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from deployments.errors import ServeError
from deployments.tuning.measure import wait_until_idle

# Responses to check in each round of a level: those to the first requests.
CHECKED_RESPONSES = 16
# A level is skipped if its requests are expected to take more seconds than this. Too few of them
# would end within the measured window.
MAX_EXPECTED_S = 10.0
_PROBE = LoadPlan(connections=1, seconds=0.01, warm_up_s=0.0, drain_s=120.0)

StartServer = Callable[[], AbstractContextManager[ServerProcess]]


@dataclass(slots=True)
class Meter:
    """A server and its measurements so far. `start` runs the server and may raise ServeError."""

    name: str
    apis: Sequence[Api]
    bounds: AnswerBounds
    start: StartServer
    loads: dict[LevelName, list[LoadResult]] = field(default_factory=dict)
    answers: dict[str, list[RawAnswer]] = field(default_factory=dict)  # key: workload name
    skipped: set[LevelName] = field(default_factory=set)
    idle_cores: list[float] = field(default_factory=list)  # CPU cores used while idle

    def find_api(self, workload: TextWorkload) -> Api | None:
        """Return the API for a workload; None if the server does not support the workload."""
        matching = (a for a in self.apis if isinstance(a, CompletionApi) == workload.is_generation)
        return next(matching, None)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A running server with the requests of one workload."""

    meter: Meter
    server: ServerProcess
    api: Api
    requests: Sequence[bytes]
    workload: TextWorkload

    def run(self, plan: LoadPlan) -> tuple[LoadResult, list[RawAnswer]]:
        """Run one phase of load. Return its result and the first answers."""
        sample = range(min(CHECKED_RESPONSES, len(self.requests)))
        traffic = Workload(self.requests, sample)
        result = uvloop.run(run_load(self.server.address, traffic, plan))
        texts = self.workload.requests
        return result, [RawAnswer(texts[i], raw) for i, raw in sorted(traffic.responses.items())]


def estimate_s(connections: int, earlier: Sequence[LoadResult]) -> float:
    """Return the expected duration of requests at `connections` by the best of `earlier` rates.

    A window without a response shows only that the rate is below one response per window.
    """
    return connections / max(max(one.requests_per_s, 1 / one.seconds) for one in earlier)


@dataclass(frozen=True, slots=True)
class RivalRounds:
    """Systems, workloads and results of all rounds. A rival that fails is dropped."""

    ours: Meter
    rivals: dict[str, Meter]
    workloads: Sequence[TextWorkload]
    connections: Sequence[int]  # numbers of connections, ascending
    window_s: float
    references: References
    # Rival -> level -> results of Hundredfold, one per round.
    pairs: dict[str, dict[LevelName, list[LoadResult]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def run_round(self, our_server: ServerProcess, number: int) -> None:
        """Measure all rivals once. In rounds with an odd `number`, Hundredfold comes first."""
        for name, rival in list(self.rivals.items()):
            log_progress(f"round {number}: starting {name}")
            try:
                with rival.start() as server:
                    self._measure_rival(rival, server, our_server, number)
            except ServeError as exc:
                self.drop(name, exc.message)

    def drop(self, name: str, reason: str) -> None:
        """Remove a rival and its paired measurements. The results state `reason`."""
        log_progress(f"{name} is left out: {reason}")
        self.missing[name] = reason
        self.rivals.pop(name, None)
        self.pairs.pop(name, None)

    def _measure_rival(
        self, rival: Meter, server: ServerProcess, our_server: ServerProcess, number: int
    ) -> None:
        for workload in self.workloads:
            peer = self._open(rival, server, workload)
            hundredfold = self._open(self.ours, our_server, workload)
            if peer is None or hundredfold is None:
                continue
            levels = self._list_levels(workload)
            if rival.skipped.issuperset(levels):
                continue
            if self._probe(peer) > MAX_EXPECTED_S:
                rival.skipped.update(levels)
            for level in levels:
                if self._is_skipped(rival, level):
                    continue
                order = (hundredfold, peer) if number % 2 else (peer, hundredfold)
                for active, idle in (order, order[::-1]):
                    self._measure(active, idle, level, rival.name, number)

    def _open(
        self, meter: Meter, server: ServerProcess, workload: TextWorkload
    ) -> LoadTarget | None:
        api = meter.find_api(workload)
        if api is None:
            return None
        build_post = server.address.build_post
        requests = [build_post(api.path, api.build(texts)) for texts in workload.requests]
        return LoadTarget(meter, server, api, requests, workload)

    def _probe(self, target: LoadTarget) -> float:
        """Send one or more requests before the timing and check the answers. Return the seconds.

        Raises BenchmarkError if a request fails or an answer is wrong.
        """
        started_s = time.perf_counter()
        result, answers = target.run(_PROBE)
        elapsed_s = time.perf_counter() - started_s
        if result.failures:
            reasons = ", ".join(result.failures)
            raise BenchmarkError(
                f"`{target.workload.name}` failed: {reasons}", hint="see the log of its server"
            )
        meter = target.meter
        check = check_answers(target.api, answers, self.references, meter.bounds)
        require_right(meter.name, check)
        return elapsed_s

    def _list_levels(self, workload: TextWorkload) -> list[LevelName]:
        most = workload.max_connections
        return [
            LevelName(workload.name, count)
            for count in self.connections
            if most is None or count <= most
        ]

    def _is_skipped(self, rival: Meter, level: LevelName) -> bool:
        """Return whether `level` was skipped before, or its requests would exceed MAX_EXPECTED_S.

        Estimate the time from earlier rates of the rival. Add such a level to `rival.skipped`.
        """
        if level in rival.skipped:
            return True
        known = [
            result
            for name, results in rival.loads.items()
            for result in results
            if name.workload == level.workload
        ]
        if known and estimate_s(level.connections, known) > MAX_EXPECTED_S:
            rival.skipped.add(level)
        return level in rival.skipped

    def _measure(
        self, active: LoadTarget, idle: LoadTarget, level: LevelName, rival: str, number: int
    ) -> None:
        wait_until_idle()
        plan = LoadPlan(connections=level.connections, seconds=self.window_s)
        idle_cpu_s, started_s = idle.server.cpu_s(), time.perf_counter()
        result, answers = active.run(plan)
        elapsed_s = time.perf_counter() - started_s
        idle_end_s = idle.server.cpu_s()
        if idle_cpu_s is not None and idle_end_s is not None:
            idle.meter.idle_cores.append((idle_end_s - idle_cpu_s) / elapsed_s)
        meter = active.meter
        loads = self.pairs.setdefault(rival, {}) if meter is self.ours else meter.loads
        loads.setdefault(level, []).append(result)
        meter.answers.setdefault(level.workload, []).extend(answers)
        p50 = percentiles_ms(result.latencies_s).get("p50", float("nan"))
        log_progress(
            f"round {number}: {meter.name}, {level.workload}, {level.connections} connections, "
            f"{format_number(result.requests_per_s, 1)} requests/s, p50 {p50:.1f} ms"
        )
