"""Load on a running server: requests per second and latency at several numbers of connections.

A closed loop sends feature-extraction requests with one sentence each. Requests bypass the response
cache; `--cached N` repeats N cached sentences instead. Every round measures all levels in order,
for example 1, 16 and 64 connections. A change of the machine's speed then affects all levels
equally. `--with-engine` also measures the engine in this process, without a server, after the
levels of each round while the server is idle.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import uvloop

from benchmarks.common.agreement import CosineCheck, local_expectation, repeated_expectation
from benchmarks.common.engine_timing import SENTENCES_PER_BATCH, CoreSplit, RawEngine
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress, build_inference_body, task_path
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    add_common_options,
    add_load_options,
    add_rounds_option,
    add_url_option,
)
from benchmarks.common.report import log_progress, publish, start_run
from benchmarks.common.sentences import Sentences, load_sentences
from benchmarks.common.statistics import summarize
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from benchmarks.serving.results import (
    EngineThroughput,
    LoadLevel,
    ServingResults,
    build_tables,
    describe,
    plot_serving,
    require_correct,
    served_over_engine,
)
from deployments.artifacts.types import TaskName
from deployments.host.machine import usable_cores
from deployments.plan.resolution import SEPARATOR
from deployments.terminal.command_line import positive_count
from deployments.terminal.console import add_store_option

TASK = TaskName.FEATURE_EXTRACTION
CHECKED_RESPONSES = 200  # number of responses per level to compare after the timing


@dataclass(frozen=True, slots=True)
class ServingBenchmark:
    """The measurements that every round repeats, and their values so far."""

    address: ServerAddress
    window_s: float
    workloads: Mapping[int, Workload]  # key: number of connections
    engine: RawEngine | None
    loads: dict[int, list[LoadResult]] = field(default_factory=dict)
    engine_rates: dict[CoreSplit, list[float]] = field(default_factory=dict)

    def run_round(self, label: str) -> None:
        """Measure every level, then the engine, if there is one, with every core split."""
        for connections, workload in self.workloads.items():
            plan = LoadPlan(connections=connections, seconds=self.window_s)
            result = uvloop.run(run_load(self.address, workload, plan))
            self.loads.setdefault(connections, []).append(result)
            rate = result.requests_per_s
            log_progress(f"{label}: {connections} connections, {rate:,.0f} requests/s")
        if self.engine is not None:
            self._measure_engine(self.engine, label)

    def _measure_engine(self, engine: RawEngine, label: str) -> None:
        for split in engine.splits:
            rate = engine.sentences_per_s(split, SENTENCES_PER_BATCH)
            self.engine_rates.setdefault(split, []).append(rate)
            log_progress(f"{label}: raw engine, {split.name}, {rate:,.0f} sentences/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_common_options(parser)
    add_store_option(parser)
    add_rounds_option(parser)
    add_load_options(parser, (1, 16, 64), seconds=10.0)
    # The engine computes every sentence, so its rate says nothing about cached responses.
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--with-engine",
        action="store_true",
        help="measure the raw engine after the levels of each round, and served / raw engine",
    )
    kinds.add_argument(
        "--cached",
        type=positive_count,
        metavar="N",
        help="repeat N cached sentences; every response must come from the response cache",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Raises BenchmarkError for a failure or a wrong answer."""
    metadata = start_run("serving", arguments.command_line, arguments.seed)
    address = ServerAddress.parse(arguments.url)
    sentences = shuffle(load_sentences(arguments.data, arguments.seed), arguments.seed)
    with Client(address) as client:
        results = measure(arguments, address, client, sentences)
    publish(arguments, metadata, results, build_tables(results), text=describe(results))
    for path in plot_serving(arguments.out, metadata, results):
        log_progress(f"wrote {path}")
    require_correct(results)
    return 0


def measure(
    arguments: argparse.Namespace, address: ServerAddress, client: Client, sentences: Sentences
) -> ServingResults:
    """Run all rounds, then compare the stored responses with the expected outputs."""
    model = client.describe_model(arguments.model)
    use_cache = arguments.cached is not None
    if use_cache and arguments.cached > len(sentences.texts):
        raise BenchmarkError(
            f"there are {len(sentences.texts)} sentences, not {arguments.cached}",
            hint="lower --cached N, or name more sentences with --data DIR",
        )
    sentences = Sentences(sentences.origin, sentences.texts[: arguments.cached])
    for text in sentences.texts if use_cache else sentences.texts[:1]:
        response = client.infer(TASK, arguments.model, text, use_cache=use_cache)
    local = open_served(arguments, str(model.get("version")))
    engine = open_engine(local, sentences.texts) if arguments.with_engine and local else None
    workloads = build_workloads(address, sentences.texts, arguments)
    benchmark = ServingBenchmark(address, arguments.seconds, workloads, engine)
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    levels = tuple(LoadLevel.summarize(rounds) for rounds in benchmark.loads.values())
    throughput = tuple(
        EngineThroughput(split, summarize(rates)) for split, rates in benchmark.engine_rates.items()
    )
    if use_cache:
        require_hits(workload.responses for workload in workloads.values())
    return ServingResults(
        url=address.url,
        model=model,
        compute_type=response.compute_type,
        sentences=sentences.origin,
        sentence_count=len(sentences.texts),
        window_s=arguments.seconds,
        levels=levels,
        engine=throughput,
        served_over_engine=served_over_engine(levels, throughput),
        checks=compare_responses(benchmark, local, client, sentences.texts, arguments),
    )


def shuffle(sentences: Sentences, seed: int) -> Sentences:
    """Shuffle the texts, so that the two similar sentences of a pair are not adjacent."""
    texts = list(sentences.texts)
    random.Random(seed).shuffle(texts)
    return Sentences(sentences.origin, tuple(texts))


def build_workloads(
    address: ServerAddress, texts: Sequence[str], arguments: argparse.Namespace
) -> dict[int, Workload]:
    """Build a workload per level. All workloads store the responses to the same sentences."""
    path = task_path(TASK, arguments.model)
    use_cache = arguments.cached is not None
    bodies = [build_inference_body(text, use_cache=use_cache) for text in texts]
    requests = [address.build_post(path, body) for body in bodies]
    count = min(CHECKED_RESPONSES, len(texts))
    sample = random.Random(arguments.seed).sample(range(len(texts)), count)
    levels = dict.fromkeys(arguments.connections)
    return {connections: Workload(requests, sample) for connections in levels}


def require_hits(responses: Iterable[Mapping[int, bytes]]) -> None:
    """Raise BenchmarkError if a stored response did not come from the response cache."""
    heads = [raw.partition(b"\r\n\r\n")[0] for level in responses for raw in level.values()]
    misses = sum(b"x-cache: hit" not in head.lower() for head in heads)
    if misses:
        raise BenchmarkError(
            f"{misses} of {len(heads)} responses did not come from the response cache",
            hint="raise the limits of `cache` in serve_config.yaml",
        )


def open_served(arguments: argparse.Namespace, version: str) -> LocalModel | None:
    """Open the served version of the model from the store.

    If the store lacks this version, raise BenchmarkError with `--with-engine`, or return None
    without this option.
    """
    try:
        return LocalModel.open(arguments.store, f"{arguments.model}{SEPARATOR}{version}")
    except BenchmarkError as exc:
        if arguments.with_engine:
            raise
        log_progress(f"{exc.message}; responses are compared with repeated unbatched requests")
        return None


def open_engine(local: LocalModel, texts: Sequence[str]) -> RawEngine:
    """Open and warm up the raw engine on `texts`."""
    engine = RawEngine(local, texts, usable_cores())
    engine.warm_up(SENTENCES_PER_BATCH)
    return engine


def compare_responses(
    benchmark: ServingBenchmark,
    local: LocalModel | None,
    client: Client,
    texts: Sequence[str],
    arguments: argparse.Namespace,
) -> tuple[CosineCheck, ...]:
    """Compare the stored responses with outputs of unbatched passes.

    If there is a raw engine, check its batch invariance and close it.
    """
    expected = (
        local_expectation(local, usable_cores())
        if local
        else repeated_expectation(client, arguments.model)
    )
    stored = [workload.responses for workload in benchmark.workloads.values()]
    served = expected.compare(texts, stored)
    if benchmark.engine is None:
        return (served,)
    raw = benchmark.engine.check_batch_invariance(SENTENCES_PER_BATCH, arguments.seed)
    benchmark.engine.close()
    return served, raw
