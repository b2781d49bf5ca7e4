"""Hostile requests on a running cluster: no 5xx but 503, no lost neighbour, memory given back.

Half of the requests are made by schemathesis from the server's own document, the others are the
attacks of `attacks.py`, mixed by the seed. All the while a neighbour asks good questions, one after
the other. The first tenth is not counted: caches and allocators have their fill before the memory
of the replicas is read. Only for a server on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import psutil

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.options import add_run_options, add_url_option, positive_count
from benchmarks.common.report import format_number, log_progress, start_run, write_result
from benchmarks.hostile.attacks import attacks
from benchmarks.hostile.fuzzing import fuzzed_requests
from benchmarks.hostile.wire import NO_ANSWER, HostileRequest, post, request, send_raw

# How Ray names the processes of Serve's replicas.
MARK = "ServeReplica:"


def replica_memory() -> dict[str, int]:
    """Resident bytes by process, such as `ServeReplica:hundredfold:Ingress 4711`."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            resident = process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if command and MARK in command[0]:
            name = command[0][command[0].index(MARK) :].split(".")[0]
            found[f"{name} {process.pid}"] = resident
    return found


ANSWER_WAIT_S = 60.0
NEIGHBOUR_PAUSE_S = 0.02
SETTLE_S = 60.0  # how long memory may take to come back
MOST_GROWTH = 1.10
SHOWN = 20  # names of failures kept in the result
# Right for anyone who comes with too much at once.
ALWAYS_RIGHT = frozenset({408, 429, 503})


@dataclass(slots=True)
class HostileCounts:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # 5xx but 503, and no answer at all
    wrong: Counter[str] = field(default_factory=Counter)  # not the refusal that is right
    neighbour_requests: int = 0
    neighbour_lost: Counter[str] = field(default_factory=Counter)
    neighbour_worst_s: float = 0.0

    def count(self, attack: HostileRequest, status: int) -> None:
        """Enter one exchange."""
        self.statuses[status] += 1
        if status == NO_ANSWER or (status >= 500 and status != 503):
            self.failures[f"{status} {attack.name}"] += 1
        elif attack.statuses and status not in attack.statuses | ALWAYS_RIGHT:
            self.wrong[f"{status} {attack.name}"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileResults:
    """Everything the result file says beside the run's facts."""

    url: str
    requests: int
    connections: int
    seconds: float
    statuses: Mapping[str, int]
    failures: Mapping[str, int]
    wrong: Mapping[str, int]
    neighbour_requests: int
    neighbour_lost: Mapping[str, int]
    neighbour_worst_ms: float
    memory_before: Mapping[str, int]  # bytes by replica
    memory_after: Mapping[str, int]

    @property
    def growth(self) -> float | None:
        """Memory after by memory before; None where no replica was found."""
        before = sum(self.memory_before.values())
        return sum(self.memory_after.values()) / before if before else None

    @property
    def passed(self) -> bool:
        """Whether every goal was reached. Memory that nobody could read is none."""
        back = self.growth is not None and self.growth <= MOST_GROWTH
        return not (self.failures or self.wrong or self.neighbour_lost) and back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks hostile`."""
    add_url_option(parser)
    add_run_options(parser)
    for name, default in (("--requests", 10_000), ("--connections", 16)):
        parser.add_argument(
            name, type=positive_count, default=default, metavar="N", help="default: %(default)s"
        )


def run(arguments: argparse.Namespace) -> int:
    """Attack, compare, print, write; 1 when a goal was missed."""
    command: str = arguments.command_line
    facts = start_run("hostile", command, arguments.seed)
    target = ServerAddress.parse(arguments.url)
    require_own_machine(target)
    figures = asyncio.run(measure(target, arguments))
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    return 0 if figures.passed else 1


def require_own_machine(target: ServerAddress) -> None:
    """Raises BenchmarkError: other people's servers are not attacked."""
    try:
        own = target.host == "localhost" or ipaddress.ip_address(target.host).is_loopback
    except ValueError:
        own = False
    if not own:
        raise BenchmarkError(
            f"`{target.host}` is not this machine", hint="run it where the server runs"
        )


async def measure(target: ServerAddress, arguments: argparse.Namespace) -> HostileResults:
    """Warm up, read the memory, attack, read it again."""
    models = await models_by_task(target)
    mixed = await mix_requests(target, models, arguments.requests, arguments.seed)
    warm_up, counted = mixed[: len(mixed) // 10], mixed
    log_progress(f"{len(counted)} requests, after {len(warm_up)} that are not counted")
    await run_attacks(target, warm_up, models, arguments.connections)
    before = replica_memory()
    began_s = time.perf_counter()
    tally = await run_attacks(target, counted, models, arguments.connections)
    seconds = time.perf_counter() - began_s
    after = await wait_until_drained(sum(before.values()))
    return HostileResults(
        url=target.url,
        requests=len(counted),
        connections=arguments.connections,
        seconds=seconds,
        statuses={str(status): n for status, n in sorted(tally.statuses.items())},
        failures=dict(tally.failures.most_common(SHOWN)),
        wrong=dict(tally.wrong.most_common(SHOWN)),
        neighbour_requests=tally.neighbour_requests,
        neighbour_lost=dict(tally.neighbour_lost),
        neighbour_worst_ms=tally.neighbour_worst_s * 1e3,
        memory_before=before,
        memory_after=after,
    )


async def get_json(target: ServerAddress, path: str) -> Any:
    """What a GET answers. Raises BenchmarkError."""
    got = await send_raw(target, request("GET", target.prefix + path), ANSWER_WAIT_S)
    if got.status != 200:
        raise BenchmarkError(
            f"`{target.url}{path}` answered {got.status}", hint="start it with `make serve`"
        )
    return orjson.loads(got.body)


async def models_by_task(target: ServerAddress) -> dict[str, str]:
    """The first model for each task that is served. Raises BenchmarkError without an embedder."""
    found: dict[str, str] = {}
    for model in (await get_json(target, "/models"))["data"]:
        for task in model.get("tasks", ()):
            found.setdefault(task, model["id"])
    if "feature-extraction" not in found:
        raise BenchmarkError(
            "no embedding model is served", hint="the neighbour needs one; see `/models`"
        )
    return found


async def mix_requests(
    target: ServerAddress, models: Mapping[str, str], count: int, seed: int
) -> list[HostileRequest]:
    """`count` requests in an order that depends on `seed` only."""
    document = await get_json(target, "/openapi.json")
    ids = sorted(set(models.values()))
    log_progress("making requests of the server's document")
    fuzzed = fuzzed_requests(document, target, ids, count // 2, seed)
    known = list(attacks(models))
    # One that stalls keeps a connection for as long as a body may take.
    again = itertools.cycle([attack for attack in known if not attack.stalls])
    chosen = [HostileRequest(fuzzed_name(raw), raw, frozenset()) for raw in fuzzed] + known
    chosen += itertools.islice(again, max(0, count - len(chosen)))
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def fuzzed_name(raw: bytes) -> str:
    """Method and path of a request."""
    return raw.partition(b" HTTP/")[0][:100].decode("latin-1")


async def run_attacks(
    target: ServerAddress,
    chosen: Sequence[HostileRequest],
    models: Mapping[str, str],
    connections: int,
) -> HostileCounts:
    """Send everything over `connections` at a time, the neighbour beside them."""
    tally = HostileCounts()
    waiting = iter(chosen)

    async def attacker() -> None:
        for attack in waiting:
            got = await send_raw(target, attack.raw, ANSWER_WAIT_S)
            tally.count(attack, got.status)

    neighbour = asyncio.create_task(send_repeatedly(target, models["feature-extraction"], tally))
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(attacker())
    neighbour.cancel()
    (ended,) = await asyncio.gather(neighbour, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):
        raise AssertionError("this is a bug: the neighbour stopped asking") from ended
    return tally


async def send_repeatedly(target: ServerAddress, model_id: str, tally: HostileCounts) -> None:
    """One good request after the other, past the response cache."""
    body = orjson.dumps({"inputs": "a good neighbour", "options": {"use_cache": False}})
    raw = post(f"{target.prefix}/models/{model_id}", body)
    while True:
        began_s = time.perf_counter()
        got = await send_raw(target, raw, ANSWER_WAIT_S)
        tally.neighbour_requests += 1
        tally.neighbour_worst_s = max(tally.neighbour_worst_s, time.perf_counter() - began_s)
        if got.status != 200:
            tally.neighbour_lost[str(got.status)] += 1
        await asyncio.sleep(NEIGHBOUR_PAUSE_S)


async def wait_until_drained(before_bytes: int) -> dict[str, int]:
    """The memory of the replicas once it is back, or after SETTLE_S."""
    until_s = time.perf_counter() + SETTLE_S
    while True:
        found = replica_memory()
        back = sum(found.values()) <= before_bytes * MOST_GROWTH
        if back or time.perf_counter() > until_s:
            return found
        await asyncio.sleep(1.0)


def describe(figures: HostileResults) -> str:
    """The figures in words."""
    told = ", ".join(f"{status}: {n}" for status, n in figures.statuses.items())
    growth = "unknown: no replica found here" if figures.growth is None else (
        f"{(figures.growth - 1) * 100:+.1f} %"
    )  # fmt: skip
    lines = [
        f"{format_number(figures.requests)} hostile requests in {figures.seconds:.0f} s ({told})",
        f"failures (5xx but 503, or no answer): {sum(figures.failures.values())}",
        f"answers other than the right one: {sum(figures.wrong.values())}",
        f"neighbour: {format_number(figures.neighbour_requests)} requests, "
        f"{sum(figures.neighbour_lost.values())} lost, worst {figures.neighbour_worst_ms:.0f} ms",
        f"resident memory of the replicas: {growth}",
    ]
    lines += [f"  {n} x {name}" for name, n in {**figures.failures, **figures.wrong}.items()]
    return "\n".join([*lines, "passed" if figures.passed else "FAILED"])
