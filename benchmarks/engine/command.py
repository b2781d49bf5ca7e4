"""The raw engine: sentences per second and latency by shape, beside torch where asked for.

The same sealed artifact, encoder, collation and engine as in an encoder, without everything around
them. Rounds are interleaved, so that a machine that slows down does so for every row alike.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from benchmarks.common.options import (
    add_common_options,
    add_rounds_option,
    add_store_option,
    positive_count,
)
from benchmarks.common.plots import plot_engine
from benchmarks.common.report import log_progress, start_run, write_result
from benchmarks.common.sentences import Sentences, load_sentences
from benchmarks.common.statistics import summarize
from benchmarks.engine.results import ENGINE, TORCH, EngineResults, describe, torch_over_engine
from deployments.artifacts.store import LATEST_NAME
from deployments.engines import EncoderEngine
from deployments.machine import usable_cores

# Sentences on which torch and the engine are compared, each computed alone.
COMPARED_WITH_TORCH = 32


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """What is measured in every round, and what the rounds have given so far."""

    engine: RawEngine
    sizes: Sequence[int]  # sentences per batch
    cells: Sequence[ShapeTiming]
    speeds: dict[tuple[CoreSplit, int], list[float]] = field(default_factory=dict)

    def run_round(self, label: str) -> None:
        """Every size on every placement once, then every cell of the latency table."""
        for size in self.sizes:
            for placement in self.engine.list_core_splits:
                speed = self.engine.sentences_per_s(placement, size)
                self.speeds.setdefault((placement, size), []).append(speed)
                log_progress(
                    f"{label}: batches of {size}, {placement.name}, {speed:,.0f} sentences/s"
                )
        for cell in self.cells:
            cell.run_round()
            ms = cell.medians_ms[-1]
            log_progress(f"{label}: {cell.contender}, {cell.shape.name}, {ms:.2f} ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks engine`."""
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
        help="compare with torch eager fp32; SOURCE as for `build_artifacts build`, "
        "default: what the artifact was built from",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print, write. Raises BenchmarkError, also when an answer was wrong."""
    command: str = arguments.command_line
    facts = start_run("engine", command, arguments.seed)
    sentences = load_sentences(arguments.data, arguments.seed)
    with ExitStack() as stack:
        figures = measure(arguments, sentences, stack)
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    for path in plot_engine(arguments.out, facts, figures):
        print(path)
    require_agreement(figures.agreements)
    return 0


def measure(arguments: argparse.Namespace, sentences: Sentences, stack: ExitStack) -> EngineResults:
    """All rounds, then the comparison of answers."""
    model = LocalModel.open(arguments.store, arguments.model, LATEST_NAME)
    engine = RawEngine(model, sentences.texts, usable_cores())
    stack.callback(engine.close)
    torch = open_torch_baseline(arguments.torch, model, stack)
    contenders: dict[str, Forward] = {ENGINE: engine.run_split_batch}
    if torch is not None:
        contenders[TORCH] = torch.run
    shapes = cap_shapes(model.manifest.max_tokens)
    cells = build_timings(contenders, shapes, engine.items, arguments.seed)
    benchmark = EngineBenchmark(engine, tuple(dict.fromkeys(arguments.batch)), cells)
    for size in benchmark.sizes:
        engine.warm_up(size)
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    latencies = tuple(cell.latency() for cell in cells)
    return EngineResults(
        model_id=model.manifest.id,
        version=model.manifest.version,
        compute_type=model.compute_type,
        sentences=sentences.origin,
        sentence_count=len(sentences.texts),
        mean_tokens=float(np.mean([len(item.ids) for item in engine.items])),
        threads=usable_cores(),
        speeds=tuple(
            SentenceThroughput(placement, size, summarize(found))
            for (placement, size), found in benchmark.speeds.items()
        ),
        latencies=latencies,
        torch_over_engine=torch_over_engine(latencies, model.manifest.max_tokens),
        agreements=compare(benchmark, torch, model, arguments.seed),
    )


def open_torch_baseline(
    source: str | None, model: LocalModel, stack: ExitStack
) -> EncoderEngine | None:
    """Torch on all cores; None where `source` is. An empty one: what the artifact is made of."""
    if source is None:
        return None
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return open_torch(source or None, model.manifest, scratch, usable_cores())


def compare(
    benchmark: EngineBenchmark, torch: EncoderEngine | None, model: LocalModel, seed: int
) -> tuple[CosineCheck, ...]:
    """The engine in company with itself alone, and with torch."""
    engine = benchmark.engine
    own = tuple(engine.agreement(size, seed) for size in benchmark.sizes if size > 1)
    if torch is None:
        return own
    items = engine.items[:COMPARED_WITH_TORCH]
    with_torch = CosineCheck.of(
        f"the engine and {TORCH}",
        unbatched_outputs(engine.engine(engine.list_core_splits[-1]), items),
        unbatched_outputs(torch, items),
        model.candidate.parity.cosine_worst - COSINE_SLACK,
    )
    return (*own, with_torch)
