"""Benchmark that kills and stops processes of a server under steady load, one process at a time.

The benchmark starts its own server and signals only processes of this server. It compares every
answer with the answer to the same request before the faults.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import DEFAULT_GENERATOR, DEFAULT_MODEL, add_run_options
from benchmarks.common.report import (
    RunMetadata,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.faults.load import (
    RIGHT,
    KnownRequest,
    SteadyLoad,
    build_encoder_requests,
    build_generator_requests,
)
from benchmarks.faults.results import (
    SLOW_S,
    FaultResult,
    build_table,
    merge,
    summarize_fault,
)
from benchmarks.servers.own_server import POLL_S, Server, start_server
from benchmarks.servers.process_kinds import (
    ACTION_NAMES,
    KINDS,
    ProcessFault,
    ProcessKind,
    find_processes,
)
from benchmarks.servers.processes import stop_signals_interrupt
from cluster.default_config import CONFIG_HELP, find_config
from deployments.terminal.command_line import positive_number, positive_seconds

LEAD_S = 3.0  # s of load before the fault
CALM_S = 3.0  # s without a failed or slow request after which the server counts as recovered
MAX_WATCH_S = 90.0  # maximum s to wait for the recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The load, and the time to watch the server after each fault."""

    encoders: list[KnownRequest]
    generators: list[KnownRequest]
    encoder_rate: float  # requests/s
    generator_rate: float
    seconds: float  # minimum s to watch the server after a fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=CONFIG_HELP)
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="default: %(default)s")
    parser.add_argument(
        "--writer", default=DEFAULT_GENERATOR, metavar="ID", help="default: %(default)s"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        metavar="PROCESS",
        help=f"default: all of {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--faults", nargs="+", choices=list(ACTION_NAMES), default=list(ACTION_NAMES)
    )
    for name, rate in (("--encoder-rate", 20.0), ("--generator-rate", 2.0)):
        parser.add_argument(
            name,
            type=positive_number,
            default=rate,
            metavar="N",
            help="requests/s (default: %(default)s)",
        )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=20.0,
        metavar="S",
        help="after each fault, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="FILE",
        help="result file of a former run, whose other faults are kept",
    )
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cause the faults and write the results.

    If the run ends early, for example because the server does not recover, write the results so
    far. `--merge` accepts this file.

    Raises BenchmarkError if a fault of this run misses its goal.
    """
    metadata = start_run("faults", arguments.command_line, arguments.seed)
    former = read_former(arguments.merge)
    config = find_config(arguments.config)
    chosen = [kind for name, kind in KINDS.items() if name in arguments.only]
    measured: list[FaultResult] = []

    def publish_results(run: RunMetadata) -> None:
        if measured:
            results = merge(former, measured)
            publish(arguments, run, results, [build_table(results)])

    with (
        publish_at_end(metadata, publish_results),
        stop_signals_interrupt(),
        start_server(config, arguments.out) as server,
    ):
        asyncio.run(cause_faults(server, arguments, chosen, measured))
    if missed := [f"{one.action} {one.kind}" for one in measured if not one.is_reached]:
        raise BenchmarkError(f"missed the goal: {', '.join(missed)}", hint="see the server's log")
    return 0


def read_former(path: Path | None) -> list[FaultResult]:
    """Return the results in the file of an earlier run, or no results if `path` is None.

    Raises BenchmarkError if the file cannot be read.
    """
    if path is None:
        return []
    try:
        return [FaultResult(**one) for one in orjson.loads(path.read_bytes())["results"]]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BenchmarkError(
            f"`{path}` is no result of `bench faults`: {exc!r}",
            hint="name a file of a former run with --merge FILE",
        ) from exc


async def cause_faults(
    server: Server,
    arguments: argparse.Namespace,
    kinds: list[ProcessKind],
    results: list[FaultResult],
) -> None:
    """Cause all faults, and append the result of each to `results`."""
    plan = FaultPlan(
        encoders=await build_encoder_requests(server.address, arguments.model),
        generators=await build_generator_requests(server.address, arguments.writer),
        encoder_rate=arguments.encoder_rate,
        generator_rate=arguments.generator_rate,
        seconds=arguments.seconds,
    )
    for action in arguments.faults:
        for kind in kinds:
            log_progress(f"{kind.name}: {ACTION_NAMES[action]}")
            await server.wait_until_complete()
            results.append(await cause_fault(server, kind, action, plan))
            log_progress(build_table(results[-1:]).text.splitlines()[-1])


async def cause_fault(
    server: Server, kind: ProcessKind, action: ProcessFault, plan: FaultPlan
) -> FaultResult:
    """Kill or stop the youngest process of a kind under load, and watch the server recover.

    Raises BenchmarkError if no process of this kind runs.
    """
    load = SteadyLoad(server.address)
    load.start(plan.encoders, plan.encoder_rate)
    load.start(plan.generators, plan.generator_rate)
    try:
        await asyncio.sleep(LEAD_S)
        former = find_processes(server.launcher, kind)
        if not former:
            raise BenchmarkError(
                f"no process of the kind {kind.name} runs {LEAD_S:g} s after the start of the load",
                hint="see the server's log",
            )
        victim = former[-1]
        fault_s = time.perf_counter()
        victim.kill() if action == "kill" else victim.suspend()
        try:
            successor_s = await watch(server, kind, former, load, plan.seconds)
        finally:
            with suppress(psutil.Error):
                victim.resume()
    finally:
        await load.stop()
    return summarize_fault(kind, action, load.observations, fault_s, successor_s)


async def watch(
    server: Server,
    kind: ProcessKind,
    former: Sequence[psutil.Process],
    load: SteadyLoad,
    seconds: float,
) -> float | None:
    """Wait for `seconds`, then until no request fails or is slow. Stop after MAX_WATCH_S.

    Return the seconds until a new process of `kind` was found; None if there was none. `former`
    holds the processes of this kind before the fault.
    """
    started_s = time.perf_counter()
    successor_s: float | None = None
    while True:
        await asyncio.sleep(POLL_S)
        elapsed_s = time.perf_counter() - started_s
        if successor_s is None:
            found = await asyncio.to_thread(find_processes, server.launcher, kind)
            if any(process not in former for process in found):
                successor_s = elapsed_s
        if elapsed_s > MAX_WATCH_S or (elapsed_s > seconds and is_calm(load)):
            return successor_s


def is_calm(load: SteadyLoad) -> bool:
    """Return whether all requests that ended in the last CALM_S seconds were right and not slow.

    Slow means longer than SLOW_S. Return False if no request ended.
    """
    since_s = time.perf_counter() - CALM_S
    last = [one for one in load.observations if one.ended_s > since_s]
    return bool(last) and all(one.outcome == RIGHT and one.seconds <= SLOW_S for one in last)
