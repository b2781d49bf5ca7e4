"""Benchmark that takes away a worker of the pods of Kubernetes, which run as containers here.

It needs podman or docker, and the image for CPU pods (cluster/images/Dockerfile.cpu). It kills a
worker with a replica of the ingress, drains one as the preStop hook does, and takes one off the
network, while clients of another worker send requests with known answers. After each fault a new
container takes the place of the worker. KubeRay's operator and Kubernetes take no part.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import DEFAULT_MODEL, add_run_options
from benchmarks.common.report import (
    REPOSITORY,
    RunMetadata,
    Table,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.faults.load import (
    RIGHT,
    WRONG,
    KnownRequest,
    Observation,
    SteadyLoad,
    build_encoder_requests,
)
from benchmarks.faults.results import MIN_ANSWERED
from benchmarks.pods.containers import ENGINES, find_engine
from benchmarks.pods.pod_cluster import PodCluster, run_pods
from benchmarks.servers.processes import stop_signals_interrupt
from deployments.terminal.command_line import positive_number, positive_seconds
from deployments.terminal.console import add_store_option

LEAD_S = 4.0  # s of load before the fault
FAULTS: Mapping[str, Callable[[PodCluster, int], None]] = {
    "kill": PodCluster.kill,
    "drain": PodCluster.drain,
    "disconnect": PodCluster.disconnect,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFaultResult:
    """Answers to the clients of one worker while another worker goes."""

    fault: str
    requests: int
    failed: Mapping[str, int]  # requests without a right answer, by outcome
    median_s: float  # of right answers, as is `worst_s`
    worst_s: float

    @property
    def is_reached(self) -> bool:
        """Whether no answer is wrong, and at least MIN_ANSWERED of the requests have one."""
        answered = self.requests - sum(self.failed.values())
        return not self.failed.get(WRONG) and answered >= MIN_ANSWERED * max(1, self.requests)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=ENGINES, help="default: the first that is installed")
    parser.add_argument(
        "--image",
        default="hundredfold-cpu",
        help="built from cluster/images/Dockerfile.cpu (default: %(default)s)",
    )
    parser.add_argument(
        "--manifest",
        type=Path,
        default=REPOSITORY / "cluster" / "kuberay" / "rayservice.yaml",
        metavar="FILE",
        help="RayService of `hundredfold render` (default: cluster/kuberay/rayservice.yaml)",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT"
    )
    parser.add_argument(
        "--rate",
        type=positive_number,
        default=50.0,
        metavar="N",
        help="requests/s (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=30.0,
        metavar="S",
        help="of load after each fault (default: %(default)s)",
    )
    parser.add_argument(
        "--first-port",
        type=int,
        default=8700,
        metavar="PORT",
        help="of 127.0.0.1, for Ray's dashboard; the next ones are the workers' "
        "(default: %(default)s)",
    )
    add_store_option(parser)
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cause the faults and write the results. Raises BenchmarkError if one misses its goal."""
    engine = find_engine(arguments.engine)
    metadata = start_run("pods", arguments.command_line, arguments.seed)
    results: list[PodFaultResult] = []

    def publish_results(run: RunMetadata) -> None:
        publish(arguments, run, results, [build_table(results)])

    with (
        publish_at_end(metadata, publish_results),
        stop_signals_interrupt(),
        run_pods(
            engine, arguments.manifest, arguments.image, arguments.store, arguments.first_port
        ) as cluster,
    ):
        for fault in arguments.only:
            results.append(asyncio.run(cause_fault(cluster, fault, arguments)))
    if missed := [result.fault for result in results if not result.is_reached]:
        raise BenchmarkError(f"missed the goal: {', '.join(missed)}", hint="see the table")
    return 0


async def cause_fault(
    cluster: PodCluster, fault: str, arguments: argparse.Namespace
) -> PodFaultResult:
    """Take away a worker with a replica of the ingress under load, and replace it afterwards."""
    victim = cluster.find_ingress_worker()
    entry = next(worker for worker in cluster.workers if worker != victim)
    requests = await build_encoder_requests(cluster.address(entry), arguments.model)
    log_progress(f"{fault} worker {victim}, clients at worker {entry}")
    observations = await observe(
        SteadyLoad(cluster.address(entry)),
        requests,
        arguments.rate,
        lambda: FAULTS[fault](cluster, victim),
        arguments.seconds,
    )
    cluster.replace(victim)
    cluster.wait_until_complete()
    result = summarize(fault, observations)
    log_progress(build_table([result]).text.splitlines()[-1])
    return result


async def observe(
    load: SteadyLoad,
    requests: Sequence[KnownRequest],
    rate: float,
    cause: Callable[[], None],
    seconds: float,
) -> list[Observation]:
    """Send requests, call `cause` after LEAD_S, and send on for `seconds`."""
    load.start(requests, rate)
    try:
        await asyncio.sleep(LEAD_S)
        await asyncio.gather(asyncio.to_thread(cause), asyncio.sleep(seconds))
    finally:
        await load.stop()
    return load.observations


def summarize(fault: str, observations: Sequence[Observation]) -> PodFaultResult:
    right = [one.seconds for one in observations if one.outcome == RIGHT]
    return PodFaultResult(
        fault=fault,
        requests=len(observations),
        failed=Counter(one.outcome for one in observations if one.outcome != RIGHT),
        median_s=median(right) if right else 0.0,
        worst_s=max(right, default=0.0),
    )


def build_table(results: Iterable[PodFaultResult]) -> Table:
    columns = ("fault", "requests", "without a right answer", "p50", "slowest right answer", "goal")
    rows = [
        (
            result.fault,
            str(result.requests),
            ", ".join(f"{outcome}: {n}" for outcome, n in result.failed.items()) or "0",
            f"{1000 * result.median_s:.1f} ms",
            f"{result.worst_s:.1f} s",
            "reached" if result.is_reached else "missed",
        )
        for result in results
    ]
    return Table("pods", columns, rows)
