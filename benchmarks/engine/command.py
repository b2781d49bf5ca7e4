"""Benchmark of the raw engine: sentences/s, latency by shape, optional comparison with torch.

It uses the artifact, tokenizer, collation and engine of an encoder replica. Every round
repeats all measurements, so that a change of the machine's speed affects all of them equally.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common.agreement import COSINE_SLACK, CosineCheck, require_agreement
from benchmarks.common.engine_timing import (
    CoreSplit,
    Forward,
    RawEngine,
    SentenceThroughput,
    ShapeTiming,
    build_timings,
    cap_shapes,
)
from benchmarks.common.local_model import LocalModel, open_torch, unbatched_outputs
from benchmarks.common.options import add_common_options, add_rounds_option
from benchmarks.common.report import log_progress, publish, start_run
from benchmarks.common.sentences import Sentences, load_sentences
from benchmarks.common.statistics import summarize
from benchmarks.engine.results import (
    ENGINE,
    TORCH,
    EngineResults,
    build_tables,
    describe,
    name_system,
    plot_engine,
    torch_over_engine,
)
from deployments.engines import EncoderEngine
from deployments.host.machine import usable_cores
from deployments.terminal.command_line import positive_count
from deployments.terminal.console import add_store_option

COMPARED_WITH_TORCH = 32  # number of sentences, one per forward pass


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """The measurements that every round repeats, and their values so far."""

    engine: RawEngine
    sizes: Sequence[int]  # batch sizes in sentences
    timings: Sequence[ShapeTiming]
    throughput: dict[tuple[CoreSplit, int], list[float]] = field(default_factory=dict)

    def run_round(self, label: str) -> None:
        """Measure every batch size on every core split, then every system at every shape."""
        for size in self.sizes:
            for split in self.engine.splits:
                rate = self.engine.sentences_per_s(split, size)
                self.throughput.setdefault((split, size), []).append(rate)
                log_progress(f"{label}: batches of {size}, {split.name}, {rate:,.0f} sentences/s")
        for timing in self.timings:
            timing.run_round()
            ms = timing.medians_ms[-1]
            log_progress(f"{label}: {timing.system}, {timing.shape}, {ms:.2f} ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    add_store_option(parser)
    add_rounds_option(parser)
    parser.add_argument(
        "--batch",
        type=positive_count,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help="sentences per batch (default: 1 8 32)",
    )
    parser.add_argument(
        "--torch",
        nargs="?",
        const="",
        metavar="SOURCE",
        help="compare with torch eager fp32; SOURCE as for `hundredfold build`; "
        "default: the source of the artifact",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Raises BenchmarkError for a failure or a wrong answer."""
    metadata = start_run("engine", arguments.command_line, arguments.seed)
    sentences = load_sentences(arguments.data, arguments.seed)
    with ExitStack() as stack:
        results = measure(arguments, sentences, stack)
    publish(arguments, metadata, results, build_tables(results), text=describe(results))
    for path in plot_engine(arguments.out, metadata, results):
        log_progress(f"wrote {path}")
    require_agreement(results.checks)
    return 0


def measure(arguments: argparse.Namespace, sentences: Sentences, stack: ExitStack) -> EngineResults:
    """Time the engine, and torch if requested, in all rounds. Then compare their outputs."""
    model = LocalModel.open(arguments.store, arguments.model)
    engine = RawEngine(model, sentences.texts, usable_cores())
    stack.callback(engine.close)
    torch = open_torch_baseline(arguments.torch, model, stack)
    # A replica runs a batch on one of the core splits, whichever its tuning found faster. A lone
    # item on the first split runs on one core.
    systems: dict[str, Forward] = {
        name_system(ENGINE, split.threads): partial(engine.run_batch, split)
        for split in engine.splits
    }
    if torch is not None:
        systems[name_system(TORCH, usable_cores())] = torch.run
    shapes = cap_shapes(model.manifest.max_tokens)
    timings = build_timings(systems, shapes, engine.items, arguments.seed)
    benchmark = EngineBenchmark(engine, tuple(dict.fromkeys(arguments.batch)), timings)
    for size in benchmark.sizes:
        engine.warm_up(size)
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    latencies = tuple(timing.latency() for timing in timings)
    return EngineResults(
        model_id=model.manifest.id,
        version=model.manifest.version,
        compute_type=model.compute_type,
        sentences=sentences.origin,
        sentence_count=len(sentences.texts),
        mean_tokens=float(np.mean([len(item.ids) for item in engine.items])),
        threads=usable_cores(),
        throughput=tuple(
            SentenceThroughput(split, size, summarize(rates))
            for (split, size), rates in benchmark.throughput.items()
        ),
        latencies=latencies,
        torch_over_engine=torch_over_engine(latencies, model.manifest.max_tokens),
        checks=compare_answers(benchmark, torch, model, arguments.seed),
    )


def open_torch_baseline(
    source: str | None, model: LocalModel, stack: ExitStack
) -> EncoderEngine | None:
    """Open the model in torch on all cores; return None if `source` is None.

    An empty `source` means the source of the artifact.
    """
    if source is None:
        return None
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return open_torch(source or None, model.manifest, scratch, usable_cores())


def compare_answers(
    benchmark: EngineBenchmark, torch: EncoderEngine | None, model: LocalModel, seed: int
) -> tuple[CosineCheck, ...]:
    """Compare batched with unbatched outputs, and the engine with torch."""
    engine = benchmark.engine
    checks = tuple(engine.check_batch_invariance(n, seed) for n in benchmark.sizes if n > 1)
    if torch is None:
        return checks
    items = engine.items[:COMPARED_WITH_TORCH]
    with_torch = CosineCheck.compare(
        f"the engine and {TORCH}",
        unbatched_outputs(engine.engine(engine.splits[-1]), items),
        unbatched_outputs(torch, items),
        model.candidate.parity.cosine_worst - COSINE_SLACK,
    )
    return (*checks, with_torch)
