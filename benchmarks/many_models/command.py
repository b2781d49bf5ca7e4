"""Benchmark of many models: Zipf traffic on thousands of models and two encoder replicas.

The replicas have room for few models. The command compares the start times of two servers: one with
few models and one with all models. A start before them reads all programs into the page cache. It
is not counted, since it would make the first of the two slower than the second.

After the traffic, requests alternate between a pinned model and the most popular of the other
models. Finally, the command requests models that no request has loaded before: one alone, then two
at a time. Their files are in the page cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress, build_inference_body, model_path
from benchmarks.common.options import DEFAULT_MODEL, add_run_options
from benchmarks.common.report import Table, log_progress, publish, start_run
from benchmarks.common.serve_config import ServeConfig, build_encoder_config
from benchmarks.common.statistics import Goal, percentiles_ms
from benchmarks.many_models.store import link_model, model_name, write_tiny_models
from benchmarks.servers.own_server import Server, start_server
from benchmarks.servers.process_kinds import KINDS, find_processes
from benchmarks.servers.processes import stop_signals_interrupt
from benchmarks.serving.load import LoadPlan, Workload, run_load
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact
from deployments.artifacts.types import TaskName
from deployments.replicas.encoder import ENGINE_BYTES
from deployments.replicas.pool_memory import ARENA_BYTES_PER_PASS
from deployments.terminal.command_line import positive_count, positive_number
from deployments.terminal.console import add_store_option

REPLICAS = 2
ENCODER_KIND = KINDS["encoder"]
FEW_MODELS = 10  # number of models in the store of the first server
PINNED = model_name(0)
# Models to load cold: the first by itself, then the other two at the same time.
COLD = [f"cold/model-{number}" for number in range(3)]
ZIPF_EXPONENT = 1.0
REQUESTS = 100_000  # number of drawn requests, which all connections share
CONNECTIONS = 8
TASK, TEXT = TaskName.FEATURE_EXTRACTION.value, "w1 w2 w3 w4"
PAIRS = 400  # pairs of requests to the hot and the pinned model


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyModelsResults:
    """Results of the benchmark, as written to the result file."""

    models: int
    room: int  # number of tiny models that fit into the model pool of a replica
    pool_bytes: int  # bytes of the model pool of each replica
    start_s: float  # s until the server with all models is ready
    start_few_s: float  # s until the server with FEW_MODELS is ready
    requests_per_s: float
    failures: Mapping[str, int]
    latency_ms: Mapping[str, float]  # latencies of the Zipf traffic, including loads of models
    models_asked: int  # number of different models in the Zipf traffic and its warm-up
    hot_ms: Mapping[str, float]
    pinned_ms: Mapping[str, float]
    cold_bytes: int  # bytes of the graph and the weights of a COLD model
    cold_s: tuple[float, ...]  # duration of the first request to each model of COLD
    encoder_mib: tuple[float, float]  # memory of all encoder replicas before and after the traffic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    add_store_option(parser)
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="that is loaded cold")
    parser.add_argument("--models", type=positive_count, default=5_000, metavar="N")
    parser.add_argument("--room", type=positive_count, default=200, metavar="N", help="per replica")
    parser.add_argument("--seconds", type=positive_number, default=30.0, metavar="S")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Raises BenchmarkError if a request fails."""
    metadata = start_run("many_models", arguments.command_line, arguments.seed)
    with (
        stop_signals_interrupt(),
        tempfile.TemporaryDirectory(prefix="many-models-") as directory,
    ):
        few, many = Path(directory, "few"), Path(directory, "many")
        few_bytes = write_store(few, FEW_MODELS, arguments)
        pool_bytes = write_store(many, arguments.models, arguments)
        _, start_few_s = (time_start(few, few_bytes, arguments) for _ in range(2))
        with start_timed(many, pool_bytes, arguments) as (server, start_s):
            measured = measure(server, arguments)
    results = ManyModelsResults(
        models=arguments.models,
        room=arguments.room,
        pool_bytes=pool_bytes,
        start_s=start_s,
        start_few_s=start_few_s,
        cold_bytes=count_cold_bytes(arguments),
        **measured,
    )
    notes = [goal.sentence for goal in evaluate_goals(results)]
    publish(arguments, metadata, results, build_tables(results), notes=notes)
    if results.failures:
        raise BenchmarkError(f"requests failed: {dict(results.failures)}", hint="see the server")
    return 0


def write_store(root: Path, models: int, arguments: argparse.Namespace) -> int:
    """Write `root`/store with `models` tiny models and the COLD models.

    Return the pool bytes with which a replica has room for `arguments.room` of the tiny models.
    """
    graph_bytes = write_tiny_models(root / "store", models)
    sealed = find_artifact(arguments.store, arguments.model)
    for model_id in COLD:
        link_model(sealed, ArtifactManifest.parse(sealed), root / "store", model_id)
    log_progress(f"{models} models sealed")
    room: int = ARENA_BYTES_PER_PASS + arguments.room * (ENGINE_BYTES + graph_bytes)
    return room


@contextmanager
def start_timed(
    root: Path, pool_bytes: int, arguments: argparse.Namespace
) -> Iterator[tuple[Server, float]]:
    """Run a server with the store in `root`. Yield it, and the seconds until it was ready."""
    config = build_config(root, pool_bytes).write(root)
    started_s = time.perf_counter()
    with start_server(config, arguments.out) as server:
        yield server, time.perf_counter() - started_s


def time_start(root: Path, pool_bytes: int, arguments: argparse.Namespace) -> float:
    """Start and end a server with the store in `root`. Return the seconds until it was ready."""
    with start_timed(root, pool_bytes, arguments) as (_, seconds):
        return seconds


def count_cold_bytes(arguments: argparse.Namespace) -> int:
    manifest = ArtifactManifest.parse(find_artifact(arguments.store, arguments.model))
    return manifest.count_bytes(manifest.candidates[0])


def build_config(root: Path, pool_bytes: int) -> ServeConfig:
    """Return a config with two CPU encoder replicas, one pinned model and no generators."""
    encoder = {"pool_bytes": pool_bytes, "concurrent_passes": 1}
    return build_encoder_config(root / "store", [PINNED], encoder, replicas=REPLICAS)


def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the traffic and the single requests. Return the measured fields of ManyModelsResults.

    Raises BenchmarkError if no request of the traffic is answered, or if a single request fails.
    """
    address = server.address
    before = read_encoder_mib(server.launcher)
    rng = np.random.default_rng(arguments.seed)
    numbers = draw_zipf(rng, arguments.models, REQUESTS)
    workload = Workload([build_request(address, model_name(number)) for number in numbers])
    plan = LoadPlan(connections=CONNECTIONS, seconds=arguments.seconds, warm_up_s=2.0)
    result = uvloop.run(run_load(address, workload, plan))
    log_progress(f"{result.requests_per_s:.0f} requests/s, failures {dict(result.failures)}")
    if not result.latencies_s.size:
        raise BenchmarkError(
            f"no request was answered: {dict(result.failures)}", hint="see the server's log"
        )
    after = read_encoder_mib(server.launcher)
    hot = model_name(int(np.bincount(numbers[numbers > 0]).argmax()))
    hot_s, pinned_s = compare(address, hot, PINNED)
    with ThreadPoolExecutor(2) as threads:
        alone = ask_timed(address, COLD[0])
        both = list(threads.map(lambda model: ask_timed(address, model), COLD[1:]))
    return {
        "requests_per_s": result.requests_per_s,
        "failures": result.failures,
        "latency_ms": percentiles_ms(result.latencies_s),
        "models_asked": len(set(numbers[: workload.taken].tolist())),
        "hot_ms": percentiles_ms(hot_s),
        "pinned_ms": percentiles_ms(pinned_s),
        "cold_s": (alone, *both),
        "encoder_mib": (before, after),
    }


def draw_zipf(rng: np.random.Generator, models: int, count: int) -> np.ndarray:
    """Draw model numbers from a Zipf distribution over a random ranking of the models."""
    weights = 1.0 / np.arange(1, models + 1) ** ZIPF_EXPONENT
    return rng.permutation(models)[rng.choice(models, size=count, p=weights / weights.sum())]


def build_request(address: ServerAddress, model_id: str) -> bytes:
    return address.build_post(model_path(model_id), build_inference_body(TEXT))


def compare(address: ServerAddress, first: str, second: str) -> tuple[list[float], list[float]]:
    """Alternate requests to two models on one connection. Return the seconds of each request."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with Client(address) as client:
        for _ in range(PAIRS):
            for model_id, times in zip((first, second), seconds, strict=True):
                times.append(_ask(client, model_id))
    return seconds


def ask_timed(address: ServerAddress, model_id: str) -> float:
    """Return the seconds of one request on a new connection."""
    with Client(address) as client:
        return _ask(client, model_id)


def _ask(client: Client, model_id: str) -> float:
    started_s = time.perf_counter()
    client.infer(TASK, model_id, TEXT)
    return time.perf_counter() - started_s


def read_encoder_mib(launcher: int) -> float:
    """Return the resident memory of all encoder replicas of the launcher's server, in MiB."""
    total = 0.0
    for process in find_processes(launcher, ENCODER_KIND):
        with suppress(psutil.Error):
            total += process.memory_info().rss / 2**20
    return total


def evaluate_goals(results: ManyModelsResults) -> list[Goal]:
    difference = results.hot_ms["p50"] - results.pinned_ms["p50"]
    before_mib, after_mib = results.encoder_mib
    pools_mib = REPLICAS * results.pool_bytes / 2**20
    return [
        Goal.at_most("p50 of a hot model beyond a pinned one, ms", difference, 2.0),
        Goal.at_most("start, relative to few models", results.start_s / results.start_few_s, 1.1),
        Goal.at_most("s of the slowest cold load", max(results.cold_s), 1.5),
        Goal.at_most("MiB that the encoders grow by", after_mib - before_mib, pools_mib),
    ]


def build_tables(results: ManyModelsResults) -> list[Table]:
    traffic = (
        f"{results.models}",
        f"{results.models_asked}",
        f"{REPLICAS} x {results.room}",
        f"{results.start_s:.1f} / {results.start_few_s:.1f}",
        f"{results.requests_per_s:.0f}",
        f"{sum(results.failures.values())}",
        f"{results.latency_ms['p50']:.1f} / {results.latency_ms['p99']:.1f}",
        " / ".join(f"{mib:.0f}" for mib in results.encoder_mib),
    )
    loads = (
        f"{results.hot_ms['p50']:.2f}",
        f"{results.pinned_ms['p50']:.2f}",
        f"{results.cold_bytes / 1e6:.1f}",
        f"{results.cold_s[0]:.2f}",
        " / ".join(f"{seconds:.2f}" for seconds in results.cold_s[1:]),
    )
    return [
        Table(
            "traffic",
            (
                "models", "asked for", "room", f"start s, with {FEW_MODELS}", "requests/s",
                "failed", "p50 / p99 ms", "encoders MiB, before / after",
            ),
            [traffic],
        ),
        Table(
            "loads",
            ("hot p50 ms", "pinned p50 ms", "cold MB", "alone s", "two at a time s"),
            [loads],
        ),
    ]  # fmt: skip
