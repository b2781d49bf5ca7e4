"""Profile of a running server: CPU time and wake-ups per request of each process, and stacks.

The load is the closed loop of `bench serving`: sentences without the response cache. The server
must run on this host. With `--samples`, py-spy samples the stacks of each replica. The profile then
includes functions, and the stacks are written in the collapsed format of flame graph tools.
"""

from __future__ import annotations

import argparse
import operator
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress, build_inference_body, task_path
from benchmarks.common.options import add_common_options, add_load_options, add_url_option
from benchmarks.common.report import Table, format_number, log_progress, publish, start_run
from benchmarks.common.sentences import load_sentences
from benchmarks.common.statistics import percentiles_ms
from benchmarks.servers.local_server import find_launcher
from benchmarks.servers.process_kinds import find_members
from benchmarks.serving.load import LoadPlan, Workload, run_load
from deployments.artifacts.types import TaskName

TASK = TaskName.FEATURE_EXTRACTION
REPLICA = re.compile(r"ray::ServeReplica:[^:]+:(\w+)")
RAY_PROCESSES = re.compile(r"ray::|raylet|gcs_server|ray/dashboard|ray/_private")
VOLUNTARY_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
OTHER_RAY = "other Ray processes"
SAMPLES_PER_S = 200
SHOWN_THREADS = 3
SHOWN_FUNCTIONS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_common_options(parser)
    add_load_options(parser, (1, 64), seconds=10.0)
    parser.add_argument("--samples", action="store_true", help="sample the stacks with py-spy")


def run(arguments: argparse.Namespace) -> int:
    """Measure all numbers of connections.

    Raises BenchmarkError if the server does not answer, or if py-spy is needed and not installed.
    """
    metadata = start_run("profile", arguments.command_line, arguments.seed)
    address = ServerAddress.parse(arguments.url)
    launcher = find_launcher(address)
    if arguments.samples:
        find_py_spy()
    texts = load_sentences(arguments.data, arguments.seed).texts
    with Client(address) as client:
        client.infer(TASK, arguments.model, texts[0])
    path = task_path(TASK, arguments.model)
    requests = [address.build_post(path, build_inference_body(text)) for text in texts]
    levels = [
        measure_level(address, launcher, requests, connections, arguments)
        for connections in arguments.connections
    ]
    tables = [table for level in levels for table in level.tables()]
    text = "\n\n".join(f"{table.name}\n{table.text}" for table in tables)
    publish(arguments, metadata, levels, tables, text=text)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCost:
    """CPU time and wake-ups of one kind of process during the load."""

    process: str  # name of a deployment, `haproxy`, or OTHER_RAY
    cpu_ms_per_request: float
    wake_ups_per_request: float
    threads: Mapping[str, float]  # thread name -> ms per request; busiest threads only


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLevel:
    """Results at one number of connections."""

    connections: int
    requests: int  # estimated number, including those of the warm-up
    p50_ms: float
    processes: Sequence[ProcessCost]  # the most expensive first
    functions: Mapping[str, Sequence[FunctionShare]]  # key: deployment; empty without `--samples`

    def tables(self) -> Iterable[Table]:
        name = f"{self.connections} connections, p50 {self.p50_ms:.2f} ms"
        rows = [
            (
                cost.process,
                format_number(cost.cpu_ms_per_request, 3),
                format_number(cost.wake_ups_per_request, 2),
                ", ".join(f"{thread} {ms:.3f}" for thread, ms in cost.threads.items()),
            )
            for cost in self.processes
        ]
        columns = ("process", "CPU ms per request", "wake-ups per request", "busiest threads")
        yield Table(name, columns, rows)
        for deployment, shares in self.functions.items():
            cells = [(f"{s.total:.1%}", f"{s.own:.1%}", s.function) for s in shares]
            yield Table(f"{name}, {deployment}", ("total", "own", "function"), cells)


def measure_level(
    address: ServerAddress,
    launcher: int,
    requests: Sequence[bytes],
    connections: int,
    arguments: argparse.Namespace,
) -> ProfileLevel:
    """Run a warm-up and the measured load. With `--samples`, run another load for the stacks.

    Stacks need their own load, because sampling slows the server down.
    """
    plan = LoadPlan(connections=connections, seconds=arguments.seconds, warm_up_s=0.5)
    uvloop.run(run_load(address, Workload(requests), plan))
    before = read_threads(launcher)
    result = uvloop.run(run_load(address, Workload(requests), plan))
    after = read_threads(launcher)
    # The counters of the threads also cover the warm-up, but `result` only counts requests of the
    # window. The requests of the warm-up are estimated from the rate in the window.
    served = round(len(result.latencies_s) * (plan.seconds + plan.warm_up_s) / plan.seconds)
    if not served:
        raise BenchmarkError(f"no response: {dict(result.failures)}", hint="look at the server")
    log_progress(f"{connections} connections: {result.requests_per_s:,.0f} requests/s")
    functions: Mapping[str, Sequence[FunctionShare]] = {}
    if arguments.samples:
        with sample_stacks(launcher, arguments.out, connections, arguments.seconds) as stacks:
            uvloop.run(run_load(address, Workload(requests), plan))
        functions = {name: count_functions(read_stacks(paths)) for name, paths in stacks.items()}
    return ProfileLevel(
        connections=connections,
        requests=served,
        p50_ms=percentiles_ms(result.latencies_s)["p50"],
        processes=summarize_costs(before, after, served),
        functions=functions,
    )


class ThreadUsage(NamedTuple):
    """Counters of a thread since its start."""

    cpu_s: float = 0.0
    wake_ups: int = 0  # voluntary context switches: one per wait of the thread


Threads = Mapping[tuple[str, int, int, str], ThreadUsage]  # key: kind, pid, thread id, name


def read_threads(launcher: int) -> Threads:
    """Read the counters of each thread of the launcher's server.

    Raises BenchmarkError if no replica runs.
    """
    threads: dict[tuple[str, int, int, str], ThreadUsage] = {}
    for process in find_members(launcher):
        try:
            kind = classify_process(" ".join(process.cmdline()), process.name())
            if kind is None:
                continue
            for thread in process.threads():
                name = _read_thread_name(process.pid, thread.id)
                threads[kind, process.pid, thread.id, name] = ThreadUsage(
                    thread.user_time + thread.system_time, _read_wake_ups(process.pid, thread.id)
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    if not any(kind not in (OTHER_RAY, "haproxy") for kind, *_ in threads):
        raise BenchmarkError(
            "the server has no replica of Ray Serve", hint="start the server with `make serve`"
        )
    return threads


def classify_process(command: str, name: str) -> str | None:
    """Return the deployment of a replica, `haproxy`, OTHER_RAY, or None for another program."""
    if replica := REPLICA.match(command):
        return replica[1]
    if name == "haproxy":
        return name
    return OTHER_RAY if RAY_PROCESSES.search(command) else None


def _read_thread_name(pid: int, thread: int) -> str:
    try:
        name = Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
    except OSError:
        return "ended"
    return "main" if pid == thread else name


def _read_wake_ups(pid: int, thread: int) -> int:
    try:
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    except OSError:
        return 0
    found = VOLUNTARY_SWITCHES.search(status)
    return int(found[1]) if found else 0


def summarize_costs(before: Threads, after: Threads, requests: int) -> list[ProcessCost]:
    """Return how much the counters grew per request, by kind of process and by name of thread."""
    totals: defaultdict[str, float] = defaultdict(float)
    wake_ups: Counter[str] = Counter()
    threads: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for key, usage in after.items():
        kind, _pid, _thread, name = key
        earlier = before.get(key, ThreadUsage())
        spent_ms = (usage.cpu_s - earlier.cpu_s) * 1e3 / requests
        totals[kind] += spent_ms
        wake_ups[kind] += usage.wake_ups - earlier.wake_ups
        threads[kind][name] += spent_ms
    return [
        ProcessCost(
            process=kind,
            cpu_ms_per_request=total_ms,
            wake_ups_per_request=wake_ups[kind] / requests,
            threads=dict(most_first(threads[kind])[:SHOWN_THREADS]),
        )
        for kind, total_ms in most_first(totals)
    ]


def most_first(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=operator.itemgetter(1), reverse=True)


@dataclass(frozen=True, slots=True)
class FunctionShare:
    """Shares of the samples: `own` in the function itself, `total` including its callees."""

    function: str
    total: float
    own: float


def read_stacks(paths: Iterable[Path]) -> str:
    """Join stack files. Raises BenchmarkError if py-spy did not write one of the files."""
    try:
        return "".join(path.read_text() for path in paths)
    except FileNotFoundError as exc:
        raise BenchmarkError(
            f"py-spy did not write `{exc.filename}`",
            hint="run as root, which may read the memory of the replicas, and keep them running",
        ) from exc


def count_functions(collapsed: str) -> list[FunctionShare]:
    """Return the functions with the highest total share in stacks of the collapsed format."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in collapsed.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            total[frame] += int(count)
    samples = own.total()
    return [
        FunctionShare(name, count / samples, own[name] / samples)
        for name, count in total.most_common(SHOWN_FUNCTIONS)
    ]


def find_py_spy() -> str:
    """Return the path of py-spy. Raises BenchmarkError if it is not installed."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise BenchmarkError("py-spy is not installed", hint="pip install py-spy")
    return program


@contextmanager
def sample_stacks(
    launcher: int, out: Path, connections: int, seconds: float
) -> Iterator[Mapping[str, Sequence[Path]]]:
    """Sample the stacks of every replica during the block, for `seconds`.

    Yield the paths of the stack files of each deployment, one per replica. The files are complete
    after the block. Only threads that hold the GIL are sampled, which excludes forward passes and
    waiting threads. Raises BenchmarkError if py-spy is not installed.
    """
    program = find_py_spy()
    out.mkdir(parents=True, exist_ok=True)
    stacks: defaultdict[str, list[Path]] = defaultdict(list)
    samplers: list[subprocess.Popen[bytes]] = []
    for kind, pid in sorted({(kind, pid) for kind, pid, *_ in read_threads(launcher)}):
        if kind in (OTHER_RAY, "haproxy"):
            continue
        path = out / f"stacks-{kind}-{pid}-{connections}.txt"
        stacks[kind].append(path)
        command = [
            *(program, "record", "--pid", str(pid), "--gil", "--format", "raw"),
            *("--rate", str(SAMPLES_PER_S), "--output", str(path)),
            *("--duration", str(max(1, round(seconds)))),
        ]
        samplers.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    try:
        yield stacks
    finally:
        for sampler in samplers:
            try:
                sampler.wait(timeout=seconds + 30)
            except subprocess.TimeoutExpired:
                sampler.kill()
