"""Soak test: a long mixed load with random kills must cause no wrong answer and no memory growth.

`bench faults` waits for the recovery after each fault. `bench soak` kills at random times, so that
some faults hit a server that has not recovered from the previous fault.

The goal for the memory compares totals, in which a process that is killed starts small again. It
sees only leaks of processes that live on: spare kinds with `--spare`, all of them for a run without
kills. The table `growth` shows by kind how much a process grows while it lives.
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
from benchmarks.common.report import (
    RunMetadata,
    Table,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.common.statistics import Goal, require_goals
from benchmarks.faults.load import RIGHT, WRONG, Observation, SteadyLoad
from benchmarks.servers.own_server import Server, start_server
from benchmarks.servers.process_kinds import KINDS, find_members, find_processes
from benchmarks.servers.processes import stop_signals_interrupt
from benchmarks.soak.memory import (
    KindGrowth,
    MemoryLog,
    MemorySample,
    build_growth_table,
    measure_growth,
)
from benchmarks.soak.mixed_load import RATES, build_mixed_requests
from cluster.default_config import CONFIG_HELP, find_config
from deployments.terminal.command_line import positive_seconds

PAUSE_S = (15.0, 45.0)  # s between two kills, from a uniform distribution
SAMPLE_S = 10.0  # s between two readings of the memory
MAX_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class SoakResults:
    """Outcomes by kind of request, kills by kind of process, and memory samples."""

    seconds: float
    kills: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, int]]
    memory: Sequence[MemorySample]
    growth_by_kind: Sequence[KindGrowth]

    @property
    def wrong(self) -> int:
        return sum(counts.get(WRONG, 0) for counts in self.outcomes.values())


class SoakRecord:
    """What a soak test has observed so far."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.kills: Counter[str] = Counter()
        self.observations: list[Observation] = []
        self.memory = MemoryLog()

    def summarize(self) -> SoakResults:
        return SoakResults(
            time.perf_counter() - self.started_s,
            dict(self.kills),
            count_outcomes(self.observations),
            self.memory.totals,
            self.memory.summarize_kinds(),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=CONFIG_HELP)
    parser.add_argument(
        "--seconds", type=positive_seconds, default=1800.0, metavar="S", help="default: %(default)s"
    )
    parser.add_argument(
        "--spare",
        nargs="*",
        choices=list(KINDS),
        default=[],
        metavar="PROCESS",
        help=f"kinds of processes that are not killed, of {', '.join(KINDS)}",
    )
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the load and write the results.

    If the run ends early, for example because the server does not recover, write what was measured.

    Raises BenchmarkError if a goal is missed or was not measured.
    """
    metadata = start_run("soak", arguments.command_line, arguments.seed)
    config = find_config(arguments.config)
    names = [name for name in KINDS if name not in arguments.spare]
    record = SoakRecord()

    def publish_results(run: RunMetadata) -> None:
        if record.observations:
            publish_soak(arguments, run, record.summarize())

    with (
        publish_at_end(metadata, publish_results),
        stop_signals_interrupt(),
        start_server(config, arguments.out) as server,
    ):
        asyncio.run(soak(server, arguments.seconds, names, arguments.seed, record))
    require_goals(evaluate_goals(record.summarize()), hint="see the server's log")
    return 0


def publish_soak(
    arguments: argparse.Namespace, metadata: RunMetadata, results: SoakResults
) -> None:
    tables = [
        build_table(results),
        build_memory_table(results),
        build_growth_table(results.growth_by_kind),
    ]
    notes = [goal.sentence for goal in evaluate_goals(results)]
    publish(arguments, metadata, results, tables, notes=notes)


async def soak(
    server: Server, seconds: float, names: Sequence[str], seed: int, record: SoakRecord
) -> None:
    """Run the load for `seconds` and kill random processes of the kinds in `names`.

    Add all observations to `record`. Raises BenchmarkError if the server does not recover.
    """
    # The requests come first: without one of their models the server never has all processes.
    requests = await build_mixed_requests(server.address)
    await server.wait_until_complete()
    load = SteadyLoad(server.address)
    record.observations = load.observations
    for kind, rate in RATES.items():
        load.start(requests[kind], rate)
    record.started_s = time.perf_counter()
    sampling = asyncio.create_task(_sample_memory(server, record))
    try:
        await _kill_at_random(server, seconds, names, random.Random(seed), record)
        await server.wait_until_complete()
    finally:
        sampling.cancel()
        await load.stop()
    with suppress(asyncio.CancelledError):
        await sampling


async def _kill_at_random(
    server: Server, seconds: float, names: Sequence[str], chance: random.Random, record: SoakRecord
) -> None:
    """Kill processes at random times until `seconds` after the start of the load."""
    until_s = record.started_s + seconds
    while names:
        pause_s = chance.uniform(*PAUSE_S)
        if time.perf_counter() + pause_s > until_s:
            break
        await asyncio.sleep(pause_s)
        name = chance.choice(names)
        victims = await asyncio.to_thread(find_processes, server.launcher, KINDS[name])
        if victims:  # empty if Ray has not started a new process yet
            with suppress(psutil.Error):
                victims[-1].kill()
                record.kills[name] += 1
                log_progress(f"{until_s - time.perf_counter():.0f} s left: killed {name}")
    await asyncio.sleep(max(0.0, until_s - time.perf_counter()))


async def _sample_memory(server: Server, record: SoakRecord) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        elapsed_s = time.perf_counter() - record.started_s
        await asyncio.to_thread(record.memory.read, find_members(server.launcher), elapsed_s)


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
        Goal.at_most("growth of memory", measure_growth(results.memory), MAX_GROWTH),
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
