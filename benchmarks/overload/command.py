"""Overload benchmark: open loops at multiples of the measured capacity of a running server.

The capacity is the rate of a closed loop, measured before and after every open loop, because the
speed of a host changes. Goodput counts answers within the deadline of their request. The server
must run on this host, because its memory is read. A separate process generates the open loops; its
CPU time is reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import orjson
import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.options import add_rounds_option, add_run_options, add_url_option
from benchmarks.common.report import (
    RunMetadata,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.common.sentences import load_sentences
from benchmarks.overload.open_loop import OpenLoopPlan, OpenLoopResult, run_open_loop
from benchmarks.overload.results import (
    MeasuredLoop,
    OverloadResults,
    WorkloadResults,
    build_tables,
    describe,
    summarize_level,
)
from benchmarks.overload.workloads import WORKLOADS, OverloadWorkload
from benchmarks.servers.local_server import find_launcher
from benchmarks.servers.process_kinds import find_members, read_private_bytes
from benchmarks.serving.load import LoadPlan, Workload, run_load
from deployments.terminal.command_line import positive_number

FACTORS = (1.2, 3.0, 10.0)
SAMPLES = 300  # number of answers to compare per open loop, drawn by chance
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_run_options(parser)
    add_rounds_option(parser, default=2)
    parser.add_argument(
        "--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS)
    )
    parser.add_argument(
        "--factors",
        type=positive_number,
        nargs="+",
        default=FACTORS,
        metavar="X",
        help="multiples of the capacity (default: 1.2 3 10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results.

    If the run ends early, write the workloads that were measured.

    Raises BenchmarkError if a request of a closed loop fails, or if a sampled answer is wrong.
    Failures in the open loops are only counted in the results.
    """
    metadata = start_run("overload", arguments.command_line, arguments.seed)
    address = ServerAddress.parse(arguments.url)
    launcher = find_launcher(address)
    texts = load_sentences(None, arguments.seed).texts
    measured: list[WorkloadResults] = []

    def publish_results(run: RunMetadata) -> None:
        if measured:
            results = OverloadResults(url=address.url, workloads=tuple(measured))
            publish(arguments, run, results, build_tables(results), text=describe(results))

    with publish_at_end(metadata, publish_results):
        for name in arguments.workloads:
            overload = OverloadRun(address, launcher, WORKLOADS[name](texts), arguments.seed)
            measured.append(overload.measure(arguments.factors, arguments.rounds))
    if wrong := sum(level.wrong for each in measured for level in each.levels):
        raise BenchmarkError(f"{wrong} answers were wrong", hint="see the table above")
    return 0


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """Measurement of one workload at all multiples of the capacity."""

    address: ServerAddress
    launcher: int  # pid of the leader of the server's session
    workload: OverloadWorkload
    seed: int

    def measure(self, factors: Sequence[float], rounds: int) -> WorkloadResults:
        workload = self.workload
        expected = workload.answer_alone(self.address)
        capacities = [self._measure_capacity()]
        memory_mib = [read_memory_mib(self.launcher)]
        loops: dict[float, list[MeasuredLoop]] = {factor: [] for factor in factors}
        for _ in range(rounds):
            for factor, measured in loops.items():
                result = self._run_open_loop(factor * capacities[-1])
                memory_mib.append(read_memory_mib(self.launcher))
                capacities.append(self._measure_capacity())
                wrong = sum(
                    not workload.is_equal(expected[each.request], orjson.loads(each.body))
                    for each in result.exchanges
                    if each.body is not None
                )
                measured.append(MeasuredLoop(result, mean(capacities[-2:]), wrong))
                log_progress(f"{workload.name}: {factor:g} times the capacity is measured")
        window_s = (workload.timeout_s, workload.timeout_s + workload.window_s)
        return WorkloadResults(
            name=workload.name,
            timeout_s=workload.timeout_s,
            capacities_per_s=tuple(capacities),
            memory_mib=tuple(memory_mib),
            levels=tuple(
                summarize_level(
                    measured, factor=factor, timeout_s=workload.timeout_s, window_s=window_s
                )
                for factor, measured in loops.items()
            ),
        )

    def _measure_capacity(self) -> float:
        """Return the answers/s of a closed loop whose requests have ample time (60 s).

        Raises BenchmarkError if a request fails.
        """
        workload = self.workload
        requests = workload.build_requests(self.address, timeout_s=60.0)
        plan = LoadPlan(
            connections=workload.connections,
            seconds=workload.capacity_s,
            warm_up_s=workload.timeout_s / 2,
        )
        result = uvloop.run(run_load(self.address, Workload(requests), plan))
        if result.failures or not result.requests_per_s:
            raise BenchmarkError(
                f"`{workload.name}` failed below its capacity: {dict(result.failures)}",
                hint="look at the log of the server",
            )
        log_progress(f"{workload.name}: capacity {result.requests_per_s:.2f} answers/s")
        return result.requests_per_s

    def _run_open_loop(self, rate: float) -> OpenLoopResult:
        workload = self.workload
        requests = workload.build_requests(self.address, workload.timeout_s)
        return run_open_loop(
            OpenLoopPlan(
                host=self.address.host,
                port=self.address.port,
                requests=[request.decode("latin-1") for request in requests],
                rate=rate,
                seconds=workload.timeout_s + workload.window_s,
                drain_s=workload.timeout_s + 5.0,
                seed=self.seed,
                samples=SAMPLES,
            )
        )


def read_memory_mib(launcher: int) -> float:
    """Return the private memory of all processes of the server but the launcher, in MiB."""
    return sum(read_private_bytes(find_members(launcher)).values()) / MIB
