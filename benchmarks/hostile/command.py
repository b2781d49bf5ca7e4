"""Benchmark that sends hostile requests to a running server and checks statuses and memory.

schemathesis generates half of the requests from the OpenAPI document. The other half comes from
`attacks.py`. The seed shuffles all requests. A background client sends valid requests at the same
time. No valid request may fail.

A warm-up sends the attacks that do not stall, and the first 10 % of the requests. Caches and
allocators keep the memory of the largest request. The benchmark therefore compares the memory at
the end with the memory after the warm-up. No replica may end meanwhile. The server must run on this
host.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson
import psutil

from benchmarks.common.closed_loop import run_clients
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, model_path
from benchmarks.common.options import add_run_options, add_url_option
from benchmarks.common.report import Table, format_number, log_progress, publish, start_run
from benchmarks.common.statistics import Goal, require_goals
from benchmarks.common.wire import (
    CLOSED,
    NO_ANSWER,
    build_closing_post,
    build_request,
    require_ok,
    send_raw,
)
from benchmarks.hostile.attacks import build_attacks
from benchmarks.hostile.fuzzing import generate_requests
from benchmarks.hostile.requests import HostileRequest
from benchmarks.servers.local_server import find_launcher
from benchmarks.servers.process_kinds import find_members
from deployments.terminal.command_line import positive_count

# Process title of Ray Serve's replicas.
REPLICA_TITLE = "ServeReplica:"


def read_replica_memory(launcher: int) -> dict[str, int]:
    """Return the resident bytes of each replica of the launcher's server, by title and pid.

    A key is, for example, `ServeReplica:hundredfold:Ingress 4711`.
    """
    memory: dict[str, int] = {}
    for process in find_members(launcher):
        try:
            command = process.cmdline()
            resident = process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if command and REPLICA_TITLE in command[0]:
            name = command[0][command[0].index(REPLICA_TITLE) :].split(".")[0]
            memory[f"{name} {process.pid}"] = resident
    return memory


def compare_memory(before: Mapping[str, int], after: Mapping[str, int]) -> float | None:
    """Return the ratio of memory after to memory before, over replicas that are in both mappings.

    Autoscaling may start other replicas in between. Return None without a common replica.
    """
    names = before.keys() & after.keys()
    total = sum(before[name] for name in names)
    return sum(after[name] for name in names) / total if total else None


TIMEOUT_S = 60.0
LEAVE_S = 3.0  # s after which the client disconnects from a generation that may take minutes
BACKGROUND_PAUSE_S = 0.02  # pause between two valid requests
DRAIN_TIMEOUT_S = 60.0  # maximum s to wait until memory is released
MAX_MEMORY_RATIO = 1.10
MAX_FAILURES = 20  # number of the most frequent failures to write to the result file
# Statuses that any request may get: 408 after the body timeout, 429 under load. 503 is a failure,
# because the server refuses requests under load with 429.
ALWAYS_EXPECTED = frozenset({408, 429})
LATE = 504  # HTTP status, expected only for requests that state a deadline
DEADLINE = re.compile(b"timeout|deadline", re.IGNORECASE)
GENERATION_ROUTES = re.compile("/generate|/completions")


@dataclass(slots=True)
class HostileCounts:
    """Statuses and failures of all attacks, and results of the background client."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # unexpected 5xx, or no answer
    unexpected: Counter[str] = field(default_factory=Counter)  # other unexpected statuses
    background_requests: int = 0
    background_failures: Counter[str] = field(default_factory=Counter)
    background_max_s: float = 0.0

    def count(self, attack: HostileRequest, status: int) -> None:
        self.statuses[status] += 1
        if status in ALWAYS_EXPECTED or status in attack.statuses:
            return
        if (status == NO_ANSWER and attack.leaves) or (status == LATE and attack.has_deadline):
            return
        if status in (NO_ANSWER, CLOSED) or status >= 500:
            self.failures[f"{status} {attack.name}"] += 1
        elif attack.statuses:
            self.unexpected[f"{status} {attack.name}"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileResults:
    """Results of the hostile benchmark, as written to the result file."""

    url: str
    requests: int
    connections: int
    seconds: float
    statuses: Mapping[str, int]
    failed: int  # number of unexpected statuses 5xx and of requests without an answer
    failures: Mapping[str, int]  # the MAX_FAILURES most frequent of them
    unexpected_count: int  # number of other unexpected statuses
    unexpected: Mapping[str, int]  # the MAX_FAILURES most frequent of them
    background_requests: int
    background_failures: Mapping[str, int]
    background_max_ms: float
    memory_before: Mapping[str, int]  # bytes by replica
    memory_after: Mapping[str, int]

    @property
    def memory_ratio(self) -> float | None:
        """Ratio of memory after to memory before, over replicas that ran all the time.

        None if no replica ran all the time.
        """
        return compare_memory(self.memory_before, self.memory_after)

    @property
    def lost_replicas(self) -> list[str]:
        """Replicas that ended during the attacks: by a crash, or because autoscaling stopped them.

        The background client only asks the embedder, so it does not notice the loss of others.
        """
        return sorted(self.memory_before.keys() - self.memory_after.keys())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_run_options(parser)
    for name, default in (("--requests", 10_000), ("--connections", 16)):
        parser.add_argument(
            name, type=positive_count, default=default, metavar="N", help="default: %(default)s"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the attacks and write the results. Raises BenchmarkError if a goal is missed."""
    metadata = start_run("hostile", arguments.command_line, arguments.seed)
    target = ServerAddress.parse(arguments.url)
    results = asyncio.run(measure(target, find_launcher(target), arguments))
    publish(arguments, metadata, results, build_tables(results), text=describe(results))
    require_goals(evaluate_goals(results), hint="see the server's log")
    return 0


async def measure(
    target: ServerAddress, launcher: int, arguments: argparse.Namespace
) -> HostileResults:
    """Warm up, read the memory, run the attacks, read the memory again."""
    models = await models_by_task(target)
    mixed = await mix_requests(target, models, arguments.requests, arguments.seed)
    attacks = [attack for attack in build_attacks(models) if not attack.stalls]
    warm_up, counted = attacks + mixed[: len(mixed) // 10], mixed
    log_progress(f"{len(counted)} requests after {len(warm_up)} warm-up requests")
    await run_attacks(target, warm_up, models, arguments.connections)
    before = read_replica_memory(launcher)
    started_s = time.perf_counter()
    counts = await run_attacks(target, counted, models, arguments.connections)
    seconds = time.perf_counter() - started_s
    after = await wait_until_drained(launcher, before)
    return HostileResults(
        url=target.url,
        requests=len(counted),
        connections=arguments.connections,
        seconds=seconds,
        statuses={str(status): n for status, n in sorted(counts.statuses.items())},
        failed=counts.failures.total(),
        failures=dict(counts.failures.most_common(MAX_FAILURES)),
        unexpected_count=counts.unexpected.total(),
        unexpected=dict(counts.unexpected.most_common(MAX_FAILURES)),
        background_requests=counts.background_requests,
        background_failures=dict(counts.background_failures),
        background_max_ms=counts.background_max_s * 1e3,
        memory_before=before,
        memory_after=after,
    )


async def get_json(target: ServerAddress, path: str) -> Any:
    """Return the JSON body of a GET. Raises BenchmarkError for a status other than 200."""
    response = await send_raw(target, build_request("GET", target.prefix + path), TIMEOUT_S)
    hint = "start the server with `make serve`"
    return orjson.loads(require_ok(response, f"`{target.url}{path}`", hint=hint))


async def models_by_task(target: ServerAddress) -> dict[str, str]:
    """Map each served task to its first model. Raise BenchmarkError without an embedding model."""
    models: dict[str, str] = {}
    for model in (await get_json(target, "/models"))["data"]:
        for task in model.get("tasks", ()):
            models.setdefault(task, model["id"])
    if "feature-extraction" not in models:
        raise BenchmarkError(
            "no embedding model is served, but the background client requires one",
            hint="add an embedding model to `models` in serve_config.yaml",
        )
    return models


async def mix_requests(
    target: ServerAddress, models: Mapping[str, str], count: int, seed: int
) -> list[HostileRequest]:
    """Return `count` requests, shuffled by `seed`: about half generated, the others attacks.

    Attacks that do not stall are repeated to reach `count`. With a small `count`, some requests are
    left out.
    """
    document = await get_json(target, "/openapi.json")
    ids = sorted(set(models.values()))
    log_progress("generating requests from the OpenAPI document")
    generated = generate_requests(document, target, ids, count // 2, seed)
    known = list(build_attacks(models))
    # A stalled request occupies its connection until the server's body timeout.
    repeated = itertools.cycle([attack for attack in known if not attack.stalls])
    chosen = [build_generated(raw, models.get("text-generation")) for raw in generated] + known
    chosen += itertools.islice(repeated, max(0, count - len(chosen)))
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def build_generated(raw: bytes, generator: str | None) -> HostileRequest:
    """Return a generated request, named by its method and path. Any status below 500 is expected.

    The client disconnects early if the route generates text, or if the path names the model
    `generator`.
    """
    name = raw.partition(b" HTTP/")[0][:100].decode("latin-1")
    generates = GENERATION_ROUTES.search(name) or (generator and generator in unquote(name))
    has_deadline = DEADLINE.search(raw) is not None
    return HostileRequest(name, raw, frozenset(), leaves=bool(generates), has_deadline=has_deadline)


async def run_attacks(
    target: ServerAddress,
    chosen: Sequence[HostileRequest],
    models: Mapping[str, str],
    connections: int,
) -> HostileCounts:
    """Send all requests while the background client runs.

    Each request has its own connection. At most `connections` connections are open at a time.
    """
    counts = HostileCounts()

    async def send(attack: HostileRequest) -> None:
        response = await send_raw(target, attack.raw, LEAVE_S if attack.leaves else TIMEOUT_S)
        counts.count(attack, response.status)

    background_client = asyncio.create_task(
        send_repeatedly(target, models["feature-extraction"], counts)
    )
    await run_clients(connections, chosen, send)
    background_client.cancel()
    (ended,) = await asyncio.gather(background_client, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):
        raise AssertionError("bug: the background client stopped") from ended
    return counts


async def send_repeatedly(target: ServerAddress, model_id: str, counts: HostileCounts) -> None:
    """Send valid requests one after the other. The requests bypass the response cache."""
    body = build_inference_body("a valid request")
    raw = build_closing_post(target.prefix + model_path(model_id), body)
    while True:
        started_s = time.perf_counter()
        response = await send_raw(target, raw, TIMEOUT_S)
        counts.background_requests += 1
        counts.background_max_s = max(counts.background_max_s, time.perf_counter() - started_s)
        if response.status != 200:
            counts.background_failures[str(response.status)] += 1
        await asyncio.sleep(BACKGROUND_PAUSE_S)


async def wait_until_drained(launcher: int, before: Mapping[str, int]) -> dict[str, int]:
    """Wait until memory is at most MAX_MEMORY_RATIO times `before`. Return the bytes by replica.

    Return after DRAIN_TIMEOUT_S in any case, and at once without a common replica.
    """
    deadline_s = time.perf_counter() + DRAIN_TIMEOUT_S
    while True:
        memory = read_replica_memory(launcher)
        ratio = compare_memory(before, memory)
        if ratio is None or ratio <= MAX_MEMORY_RATIO or time.perf_counter() > deadline_s:
            return memory
        await asyncio.sleep(1.0)


def evaluate_goals(results: HostileResults) -> list[Goal]:
    background_failures = sum(results.background_failures.values())
    return [
        Goal.at_most("unexpected 5xx or no answer", results.failed, 0),
        Goal.at_most("other unexpected statuses", results.unexpected_count, 0),
        Goal.at_most("failed background requests", background_failures, 0),
        Goal.at_most("replicas that ended", len(results.lost_replicas), 0),
        Goal.at_most(
            "memory of the replicas, after / before", results.memory_ratio, MAX_MEMORY_RATIO
        ),
    ]


def build_tables(results: HostileResults) -> tuple[Table, ...]:
    header = ("hostile requests", "seconds", "unexpected 5xx or no answer",
              "other unexpected statuses", "background requests", "failed", "slowest, ms",
              "memory of the replicas")  # fmt: skip
    row = [
        format_number(results.requests),
        f"{results.seconds:.0f}",
        str(results.failed),
        str(results.unexpected_count),
        format_number(results.background_requests),
        str(sum(results.background_failures.values())),
        f"{results.background_max_ms:.0f}",
        describe_growth(results),
    ]
    names = {str(NO_ANSWER): "no answer"}
    statuses = [
        (names.get(status, status), format_number(n)) for status, n in results.statuses.items()
    ]
    return (
        Table("requests", header, [row]),
        Table("statuses", ("status", "answers"), statuses),
    )


def describe_growth(results: HostileResults) -> str:
    ended = "".join(f", {name} ended" for name in results.lost_replicas)
    if results.memory_ratio is None:
        return f"unknown: no replica ran all the time{ended}"
    return f"{(results.memory_ratio - 1) * 100:+.1f} %{ended}"


def describe(results: HostileResults) -> str:
    """Return the console text: counters, memory growth, failures, and whether the run passed."""
    statuses = ", ".join(f"{status}: {n}" for status, n in results.statuses.items())
    lines = [
        f"{format_number(results.requests)} hostile requests in {results.seconds:.0f} s "
        f"({statuses})",
        f"failures (unexpected 5xx, or no answer): {results.failed}",
        f"unexpected statuses: {results.unexpected_count}",
        f"background client: {format_number(results.background_requests)} requests, "
        f"{sum(results.background_failures.values())} failed, "
        f"slowest {results.background_max_ms:.0f} ms",
        f"resident memory of the replicas: {describe_growth(results)}",
    ]
    lines += [f"  {n} x {name}" for name, n in {**results.failures, **results.unexpected}.items()]
    passed = all(goal.reached for goal in evaluate_goals(results))
    return "\n".join([*lines, "passed" if passed else "FAILED"])
