"""Noisy neighbor: latency of a quiet client, first alone and then together with a loud client.

The loud client has several times as many connections as the quiet client, and another API key. Both
clients run closed loops of single sentences that bypass the response cache. Every round measures
the quiet client alone and both clients together. The order changes from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, task_path
from benchmarks.common.options import add_common_options, add_rounds_option, add_url_option
from benchmarks.common.report import (
    Table,
    format_counts,
    format_number,
    log_progress,
    publish,
    start_run,
)
from benchmarks.common.sentences import load_sentences
from benchmarks.common.statistics import Goal, require_goals, summarize, summarize_ratios
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from benchmarks.serving.results import LoadLevel
from deployments.artifacts.types import TaskName
from deployments.terminal.command_line import positive_count, positive_seconds

TASK = TaskName.FEATURE_EXTRACTION
MAX_SLOWDOWN = 2.0  # p99 of the quiet client with the loud client, relative to its p99 alone
KEY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class NeighborResults:
    """Results of the neighbor benchmark, as written to the result file."""

    url: str
    clients: Mapping[str, LoadLevel]
    goals: tuple[Goal, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_common_options(parser)
    add_rounds_option(parser)
    for name, default, text in (
        ("--connections", 4, "of the quiet client"),
        ("--factor", 10, "connections of the loud client for each of the quiet one"),
    ):
        parser.add_argument(
            name,
            type=positive_count,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=10.0,
        metavar="S",
        help="per situation and round (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results.

    Raises BenchmarkError if a client gets no response, or if a goal is missed.
    """
    metadata = start_run("neighbor", arguments.command_line, arguments.seed)
    address = ServerAddress.parse(arguments.url)
    texts = load_sentences(arguments.data, arguments.seed).texts
    quiet, loud = (_build_workload(address, arguments.model, texts, key) for key in ("q", "l"))
    results: dict[str, list[LoadResult]] = {"quiet, alone": [], "quiet": [], "loud": []}
    connections = arguments.connections
    for number in range(1, arguments.rounds + 1):
        plans = [
            LoadPlan(connections=count, seconds=arguments.seconds)
            for count in (connections, connections * arguments.factor)
        ]
        situations = [(quiet,), (quiet, loud)]
        order = situations if number % 2 else situations[::-1]
        measured = [uvloop.run(_run_all(address, workloads, plans)) for workloads in order]
        alone, together = sorted(measured, key=len)
        for name, result in zip(results, (*alone, *together), strict=True):
            if not len(result.latencies_s):
                raise BenchmarkError(
                    f"no response to the client `{name}`: {dict(result.failures)}",
                    hint="look at the log of the server",
                )
            results[name].append(result)
            rate = result.requests_per_s
            log_progress(f"round {number}/{arguments.rounds}: {name}, {rate:,.0f} requests/s")
    clients = {name: LoadLevel.summarize(rounds) for name, rounds in results.items()}
    goals = evaluate_goals(clients)
    notes = [goal.sentence for goal in goals]
    value = NeighborResults(address.url, clients, goals)
    publish(arguments, metadata, value, [build_table(clients)], notes=notes)
    require_goals(goals, hint="the result file has every value")
    return 0


async def _run_all(
    address: ServerAddress, workloads: Sequence[Workload], plans: Sequence[LoadPlan]
) -> list[LoadResult]:
    """Run the first plans at the same time, one per workload."""
    loads = (run_load(address, *each) for each in zip(workloads, plans, strict=False))
    return await asyncio.gather(*loads)


def _build_workload(address: ServerAddress, model: str, texts: Sequence[str], key: str) -> Workload:
    path = task_path(TASK, model)
    headers = {"Authorization": f"Bearer {key * KEY_LENGTH}"}
    bodies = (build_inference_body(text) for text in texts)
    return Workload([address.build_post(path, body, headers) for body in bodies])


def evaluate_goals(clients: Mapping[str, LoadLevel]) -> tuple[Goal, ...]:
    """Evaluate the slowdown and the share of the quiet client: medians of ratios within rounds.

    The fair share is half of the requests/s of both clients, but at most R / MAX_SLOWDOWN. R is the
    requests/s of the quiet client alone. At MAX_SLOWDOWN times the latency, a closed loop cannot
    send more. A failed request has no latency, so none may fail.
    """
    alone, quiet, loud = (clients[name] for name in ("quiet, alone", "quiet", "loud"))
    slowdown = summarize_ratios(quiet.latency_ms["p99"], alone.latency_ms["p99"])
    rates = [client.requests_per_s.values for client in (alone, quiet, loud)]
    fair = [min(a / MAX_SLOWDOWN, (q + other) / 2) for a, q, other in zip(*rates, strict=True)]
    share = summarize_ratios(quiet.requests_per_s, summarize(fair))
    failed = sum(sum(client.failures.values()) for client in clients.values())
    return (
        Goal.at_most("p99 of the quiet client, relative to alone", slowdown.median, MAX_SLOWDOWN),
        Goal.at_least("requests/s of the quiet client, relative to its share", share.median, 1),
        Goal.at_most("failed requests of both clients", failed, 0),
    )


def build_table(clients: Mapping[str, LoadLevel]) -> Table:
    rows = [
        (
            name,
            str(client.connections),
            format_number(client.requests_per_s.median),
            *(format_number(client.latency_ms[rank].median, 2) for rank in ("p50", "p99")),
            format_counts(client.failures),
        )
        for name, client in clients.items()
    ]
    header = ("client", "connections", "requests/s", "p50 ms", "p99 ms", "failures")
    return Table("neighbor", header, rows)
