"""Load on a running cluster: requests per second and latency at several numbers of connections.

A closed loop of single-sentence feature-extraction requests past the response cache, or with
`--cached N` of N sentences that it holds. Rounds are interleaved (1, 16, 64, 1, 16, 64, ...), so
that a machine that slows down or speeds up does so for every level alike. With `--with-engine` the
raw engine is measured between them, while the server has nothing to do.
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
from benchmarks.common.http import Client, ServerAddress, inference_body, task_path
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    add_common_options,
    add_rounds_option,
    add_store_option,
    add_url_option,
    positive_count,
    positive_seconds,
)
from benchmarks.common.plots import plot_serving
from benchmarks.common.report import log_progress, start_run, write_result
from benchmarks.common.sentences import Sentences, load_sentences
from benchmarks.common.statistics import summarize
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from benchmarks.serving.results import (
    EngineThroughput,
    LoadLevel,
    ServingResults,
    describe,
    require_correct,
    served_over_engine,
)
from deployments.artifacts.types import TaskName
from deployments.machine import usable_cores

TASK = TaskName.FEATURE_EXTRACTION
CHECKED_ANSWERS = 200  # per level, compared after the timing


@dataclass(frozen=True, slots=True)
class ServingBenchmark:
    """What is measured in every round, and what the rounds have given so far."""

    target: ServerAddress
    window_s: float
    workloads: Mapping[int, Workload]  # by number of connections
    engine: RawEngine | None
    loads: dict[int, list[LoadResult]] = field(default_factory=dict)
    speeds: dict[CoreSplit, list[float]] = field(default_factory=dict)

    def run_round(self, label: str) -> None:
        """Every level once, then the engine once per placement."""
        for connections, workload in self.workloads.items():
            plan = LoadPlan(connections=connections, seconds=self.window_s)
            result = uvloop.run(run_load(self.target, workload, plan))
            self.loads.setdefault(connections, []).append(result)
            log_progress(
                f"{label}: {connections} connections, {result.requests_per_s:,.0f} requests/s"
            )
        if self.engine is not None:
            self._measure_engine(self.engine, label)

    def _measure_engine(self, engine: RawEngine, label: str) -> None:
        for placement in engine.list_core_splits:
            speed = engine.sentences_per_s(placement, SENTENCES_PER_BATCH)
            self.speeds.setdefault(placement, []).append(speed)
            log_progress(f"{label}: raw engine, {placement.name}, {speed:,.0f} sentences/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks serving`."""
    add_url_option(parser)
    add_common_options(parser)
    add_store_option(parser)
    add_rounds_option(parser)
    parser.add_argument(
        "--connections",
        type=positive_count,
        nargs="+",
        default=[1, 16, 64],
        metavar="N",
        help="default: 1 16 64",
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=10.0,
        metavar="S",
        help="per level and round, after a second of warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--with-engine",
        action="store_true",
        help="measure the raw engine in turn with the server, and the ratio of the two",
    )
    parser.add_argument(
        "--cached",
        type=positive_count,
        metavar="N",
        help="repeat N sentences that the response cache holds; every answer must come from it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print, write. Raises BenchmarkError, also when an answer was wrong."""
    command: str = arguments.command_line
    facts = start_run("serving", command, arguments.seed)
    target = ServerAddress.parse(arguments.url)
    sentences = shuffled(load_sentences(arguments.data, arguments.seed), arguments.seed)
    with Client(target) as client:
        figures = measure(arguments, target, client, sentences)
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    for path in plot_serving(arguments.out, facts, figures):
        print(path)
    require_correct(figures)
    return 0


def measure(
    arguments: argparse.Namespace, target: ServerAddress, client: Client, sentences: Sentences
) -> ServingResults:
    """All rounds, then the comparison of the kept answers."""
    described = client.describe_model(arguments.model)
    use_cache = arguments.cached is not None
    sentences = Sentences(sentences.origin, sentences.texts[: arguments.cached])
    for text in sentences.texts if use_cache else sentences.texts[:1]:
        warm = client.infer(TASK, arguments.model, text, use_cache=use_cache)
    local = open_served(arguments, str(described.get("version")))
    engine = open_engine(local, sentences.texts) if arguments.with_engine and local else None
    workloads = make_workloads(target, sentences.texts, arguments)
    benchmark = ServingBenchmark(target, arguments.seconds, workloads, engine)
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    levels = tuple(LoadLevel.of(results) for results in benchmark.loads.values())
    speeds = tuple(EngineThroughput(p, summarize(found)) for p, found in benchmark.speeds.items())
    if use_cache:
        require_hits(workload.answers for workload in workloads.values())
    return ServingResults(
        url=target.url,
        model=described,
        compute_type=warm.compute_type,
        sentences=sentences.origin,
        sentence_count=len(sentences.texts),
        window_s=arguments.seconds,
        levels=levels,
        engine=speeds,
        served_over_engine=served_over_engine(levels, speeds),
        agreements=compare(benchmark, local, client, sentences.texts, arguments),
    )


def shuffled(sentences: Sentences, seed: int) -> Sentences:
    """The same texts in an order in which pairs do not follow each other; a function of `seed`."""
    texts = list(sentences.texts)
    random.Random(seed).shuffle(texts)
    return Sentences(sentences.origin, tuple(texts))


def make_workloads(
    target: ServerAddress, texts: Sequence[str], arguments: argparse.Namespace
) -> dict[int, Workload]:
    """A workload per level; each keeps the first answers to the same sample of sentences."""
    path = task_path(TASK, arguments.model)
    use_cache = arguments.cached is not None
    bodies = [inference_body(text, use_cache=use_cache) for text in texts]
    requests = [target.post_bytes(path, body) for body in bodies]
    count = min(CHECKED_ANSWERS, len(texts))
    kept = random.Random(arguments.seed).sample(range(len(texts)), count)
    levels = dict.fromkeys(arguments.connections)
    return {connections: Workload(requests, kept) for connections in levels}


def require_hits(answers: Iterable[Mapping[int, bytes]]) -> None:
    """Raises BenchmarkError when a kept answer did not come from the response cache."""
    heads = [raw.partition(b"\r\n\r\n")[0] for kept in answers for raw in kept.values()]
    computed = sum(b"x-cache: hit" not in head.lower() for head in heads)
    if computed:
        raise BenchmarkError(
            f"{computed} of {len(heads)} answers were computed, not remembered",
            hint="give the cache more bytes and time: `cache` in serve_config.yaml",
        )


def open_served(arguments: argparse.Namespace, version: str) -> LocalModel | None:
    """The artifact that is served, where the store has it; `--with-engine` insists on it."""
    try:
        return LocalModel.open(arguments.store, arguments.model, version)
    except BenchmarkError as exc:
        if arguments.with_engine:
            raise
        log_progress(f"{exc.message}; answers are compared with the same requests repeated alone")
        return None


def open_engine(local: LocalModel, texts: Sequence[str]) -> RawEngine:
    """The raw engine on the same sentences, warm."""
    engine = RawEngine(local, texts, usable_cores())
    engine.warm_up(SENTENCES_PER_BATCH)
    return engine


def compare(
    benchmark: ServingBenchmark,
    local: LocalModel | None,
    client: Client,
    texts: Sequence[str],
    arguments: argparse.Namespace,
) -> tuple[CosineCheck, ...]:
    """Kept answers against the right ones; the raw engine against itself."""
    judge = (
        local_expectation(local, usable_cores())
        if local
        else repeated_expectation(client, arguments.model)
    )
    kept = [workload.answers for workload in benchmark.workloads.values()]
    served = judge.compare(texts, kept)
    if benchmark.engine is None:
        return (served,)
    raw = benchmark.engine.agreement(SENTENCES_PER_BATCH, arguments.seed)
    benchmark.engine.close()
    return served, raw
