"""Soak test: a long mixed load with random kills must cause no wrong answer and no memory leak.

`bench faults` waits for the recovery after each fault. `bench soak` kills at random times, so that
some faults hit a server that has not recovered from the previous fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import add_run_options
from benchmarks.common.report import Table, log_progress, publish, start_run
from benchmarks.common.statistics import Goal
from benchmarks.faults.load import RIGHT, WRONG, Observation, SteadyLoad
from benchmarks.faults.mixed_load import RATES, build_mixed_requests
from benchmarks.servers.own_server import Server, start_server
from benchmarks.servers.process_kinds import KINDS, find_members, find_processes
from benchmarks.servers.processes import stop_signals_interrupt
from cluster.default_config import CONFIG_HELP, find_config
from deployments.command_line import positive_seconds

PAUSE_S = (15.0, 45.0)  # s between two kills, from a uniform distribution
SAMPLE_S = 10.0  # s between two readings of the memory
MAX_GROWTH = 0.05
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Private memory of all processes of the server at one time."""

    elapsed_s: float
    mib: float
    processes: int


@dataclass(frozen=True, slots=True)
class SoakResults:
    """Outcomes by kind of request, kills by kind of process, and memory samples."""

    seconds: float
    kills: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, int]]
    memory: Sequence[MemorySample]

    @property
    def wrong(self) -> int:
        return sum(counts.get(WRONG, 0) for counts in self.outcomes.values())

    @property
    def growth(self) -> float | None:
        """Relative growth of the median memory from the second quarter of the run to the last.

        The first quarter is warm-up. None if a quarter has no sample.
        """
        quarter = len(self.memory) // 4
        if not quarter:
            return None
        sizes = [sample.mib for sample in self.memory]
        return median(sizes[-quarter:]) / median(sizes[quarter : 2 * quarter]) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=CONFIG_HELP)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=1800.0, metavar="S", help="default: %(default)s"
    )
    parser.add_argument(
        "--spare",
        nargs="*",
        choices=[kind.name for kind in KINDS],
        default=[],
        metavar="PROCESS",
        help="kinds of processes that are not killed",
    )
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the load and write the results. Return 1 if a goal is missed or was not measured."""
    metadata = start_run("soak", arguments.command_line, arguments.seed)
    config = find_config(arguments.config)
    names = [kind.name for kind in KINDS if kind.name not in arguments.spare]
    with stop_signals_interrupt(), start_server(config, arguments.out) as server:
        results = asyncio.run(soak(server, arguments.seconds, names, arguments.seed))
    tables = [build_table(results), build_memory_table(results)]
    goals = evaluate_goals(results)
    publish(arguments, metadata, results, tables, notes=[goal.sentence for goal in goals])
    return 0 if all(goal.reached for goal in goals) else 1


async def soak(server: Server, seconds: float, names: Sequence[str], seed: int) -> SoakResults:
    """Run the load for `seconds` and kill random processes of the kinds in `names`.

    Raises BenchmarkError if the server does not recover.
    """
    await server.wait_until_complete()
    requests = await build_mixed_requests(server.address)
    load = SteadyLoad(server.address)
    for kind, rate in RATES.items():
        load.start(requests[kind], rate)
    started_s = time.perf_counter()
    memory: list[MemorySample] = []
    sampling = asyncio.create_task(_sample_memory(server, started_s, memory))
    try:
        kills = await _kill_at_random(server, started_s + seconds, names, random.Random(seed))
        await server.wait_until_complete()
    finally:
        sampling.cancel()
        await load.stop()
    with suppress(asyncio.CancelledError):
        await sampling
    return SoakResults(
        time.perf_counter() - started_s, kills, count_outcomes(load.observations), memory
    )


async def _kill_at_random(
    server: Server, until_s: float, names: Sequence[str], chance: random.Random
) -> dict[str, int]:
    """Kill processes at random times until `until_s`. Return the number of kills by kind."""
    kills: Counter[str] = Counter()
    kinds = [kind for kind in KINDS if kind.name in names]
    while kinds:
        pause_s = chance.uniform(*PAUSE_S)
        if time.perf_counter() + pause_s > until_s:
            break
        await asyncio.sleep(pause_s)
        kind = chance.choice(kinds)
        victims = await asyncio.to_thread(find_processes, server.launcher, kind)
        if victims:  # empty if Ray has not started a new process yet
            with suppress(psutil.Error):
                victims[-1].kill()
                kills[kind.name] += 1
                log_progress(f"{until_s - time.perf_counter():.0f} s left: killed {kind.name}")
    await asyncio.sleep(max(0.0, until_s - time.perf_counter()))
    return dict(kills)


async def _sample_memory(server: Server, started_s: float, samples: list[MemorySample]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        sizes = await asyncio.to_thread(_read_sizes, server.launcher)
        elapsed_s = time.perf_counter() - started_s
        samples.append(MemorySample(elapsed_s, sum(sizes) / MIB, len(sizes)))


def _read_sizes(launcher: int) -> list[int]:
    """Return the private bytes of each process of the server."""
    sizes = []
    for process in find_members(launcher):
        with suppress(psutil.Error):
            sizes.append(process.memory_full_info().uss)
    return sizes


def count_outcomes(observations: Sequence[Observation]) -> dict[str, dict[str, int]]:
    """Count the outcomes of each kind of request. Raise BenchmarkError without observations."""
    if not observations:
        raise BenchmarkError("no request was sent", hint="use a longer time with --seconds")
    counts: dict[str, Counter[str]] = {}
    for each in observations:
        counts.setdefault(each.kind, Counter())[each.outcome] += 1
    return {kind: dict(counts[kind]) for kind in sorted(counts)}


def evaluate_goals(results: SoakResults) -> tuple[Goal, ...]:
    return (
        Goal.at_most("wrong answers", results.wrong, 0),
        Goal.at_most("growth of memory", results.growth, MAX_GROWTH),
    )


def build_table(results: SoakResults) -> Table:
    columns = ("requests", "sent", "right", "wrong", "others, by outcome")
    rows = [_build_row(kind, counts) for kind, counts in results.outcomes.items()]
    return Table("soak", columns, rows)


def _build_row(kind: str, counts: Mapping[str, int]) -> tuple[str, ...]:
    sent = sum(counts.values())
    others = {key: count for key, count in counts.items() if key not in (RIGHT, WRONG)}
    return (
        kind,
        str(sent),
        f"{100 * counts.get(RIGHT, 0) / sent:.2f} %",
        str(counts.get(WRONG, 0)),
        ", ".join(f"{key}: {count}" for key, count in sorted(others.items())) or "-",
    )


def build_memory_table(results: SoakResults) -> Table:
    """Build a table of the median memory in parts of the run. The last row lists all kills.

    A part has at most a tenth of the samples, but at least one.
    """
    part = max(1, len(results.memory) // 10)
    rows = []
    for start in range(0, len(results.memory), part):
        samples = results.memory[start : start + part]
        rows.append(
            (
                f"{samples[-1].elapsed_s / 60:.0f} min",
                f"{median(sample.mib for sample in samples):.0f}",
                f"{median(sample.processes for sample in samples):.0f}",
            )
        )
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(results.kills.items()))
    rows.append(("killed", kills or "none", ""))
    return Table("memory", ("until", "private MiB", "processes"), rows)
