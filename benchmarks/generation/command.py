"""Text generation: tokens per second and waits, in this process, over HTTP, and beside others.

Everybody gets the same prompts and writes as many tokens, greedily. Rounds are interleaved (one
stream of everybody, then four, ... then the scenarios), so that a machine that slows down does so
for every one alike.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    add_rounds_option,
    add_run_options,
    add_store_option,
    add_url_option,
    positive_count,
)
from benchmarks.common.report import start_run, write_result
from benchmarks.generation.checkpoints import SourceCheckpoint
from benchmarks.generation.http import HttpGenerator
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.results import (
    AnswerAgreement,
    GenerationResults,
    RatioTable,
    describe,
    evaluate_goals,
    require_correct,
)
from benchmarks.generation.rounds import GenerationBenchmark, repeat_unbatched
from benchmarks.generation.scenarios import SCENARIOS, STREAMS, ChurnResults, PromptSampler, churn
from benchmarks.generation.schemas import build_schema_tasks
from benchmarks.generation.streams import IN_PROCESS, StreamingSystem
from benchmarks.generation.structured_output import SchemaResults, answer_all
from benchmarks.generation.systems import BASELINES, SystemFactory, open_baselines
from deployments.machine import installed_versions, usable_cores

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STREAM_PARTS, CHURN, STRUCTURED_OUTPUT = "levels", "churn", "schemas"
PARTS = (STREAM_PARTS, *SCENARIOS, CHURN, STRUCTURED_OUTPUT)
PACKAGES = ("onnxruntime-genai", "llama-cpp-python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks generation`."""
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="default: %(default)s")
    add_store_option(parser)
    add_url_option(parser)
    add_run_options(parser)
    add_rounds_option(parser)
    counts = {
        "--new-tokens": (64, "of each answer"),
        "--prompt-tokens": (64, "of each prompt"),
        "--churn": (1_000, "requests of the part `churn`"),
    }
    for option, (default, what) in counts.items():
        parser.add_argument(
            option,
            type=positive_count,
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--streams",
        type=positive_count,
        nargs="+",
        default=[1, 4, STREAMS, 16],
        metavar="N",
        help="default: 1 4 8 16",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help=f"default: {' '.join(PARTS)}"
    )
    _add_options_of_others(parser)


def _add_options_of_others(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without", nargs="+", choices=tuple(BASELINES), default=(), help="who is not measured"
    )
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help="the checkpoint for the others, as for `build_artifacts build`; default: what the "
        "artifact was built from",
    )
    parser.add_argument(
        "--genai",
        type=Path,
        metavar="DIR",
        help="output of onnxruntime-genai's model builder; default: it is run",
    )
    parser.add_argument(
        "--genai-precision",
        choices=("int4", "int8", "fp32"),
        help="what it is asked for when it is run; default: as the artifact",
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp")


def run(arguments: argparse.Namespace) -> int:
    """Measure, compare, print, write. Raises BenchmarkError, also when an answer was wrong."""
    command: str = arguments.command_line
    facts = start_run("generation", command, arguments.seed)
    with ExitStack() as stack:
        figures = measure(arguments, stack)
    print(describe(figures))
    print(write_result(arguments.out, facts, figures))
    require_correct(figures)
    return 0


def measure(arguments: argparse.Namespace, stack: ExitStack) -> GenerationResults:
    """All rounds, then what is asked again alone, churn and schemas. Raises ServeError."""
    model = LocalModel.open_by_name(arguments.store, arguments.model)
    threads, rows = usable_cores(), max(STREAMS, *arguments.streams)
    runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
    service = InProcessGenerator(model, rows=rows, threads=threads, events=runner.get_loop())
    stack.callback(service.close)
    check_room(arguments, service.context)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    origin = SourceCheckpoint(model, arguments.source, scratch)
    entrance = SystemFactory(
        arguments, model, origin, runner, stack, rows, threads, service.context
    )
    benchmark = open_benchmark(arguments, entrance, StreamingSystem(IN_PROCESS, service, runner))
    benchmark.warm_up()
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    alone = repeat_unbatched(benchmark)
    churned: ChurnResults | None = None
    if CHURN in arguments.parts:
        churned = runner.run(churn(service, benchmark.book, benchmark.rng, arguments.churn, rows))
    filled = schemas(benchmark, arguments.seed) if STRUCTURED_OUTPUT in arguments.parts else None
    return build_results(entrance, benchmark, alone, churned, filled)


def schemas(benchmark: GenerationBenchmark, seed: int) -> SchemaResults | None:
    """What the server makes of them; None where none takes part, or it has failed before."""
    for one in benchmark.others:
        if isinstance(one, StreamingSystem) and isinstance(one.service, HttpGenerator):
            return one.runner.run(answer_all(one.service, build_schema_tasks(random.Random(seed))))
    return None


def build_results(
    entrance: SystemFactory,
    benchmark: GenerationBenchmark,
    alone: AnswerAgreement | None,
    churned: ChurnResults | None,
    filled: SchemaResults | None,
) -> GenerationResults:
    """Everything in its place."""
    board = RatioTable((*benchmark.levels, *benchmark.scenario_results))
    ratios = board.ratios()
    return GenerationResults(
        model_id=entrance.model.manifest.id,
        version=entrance.model.manifest.version,
        compute_type=entrance.model.compute_type,
        threads=entrance.threads,
        prompt_tokens=benchmark.prompt_tokens,
        new_tokens=benchmark.new_tokens,
        levels=benchmark.levels,
        scenarios=benchmark.scenario_results,
        churn=churned,
        schemas=filled,
        alone=alone,
        answer_agreements=benchmark.answer_agreements,
        notes=tuple(entrance.notes),
        packages=installed_versions(PACKAGES),
        missing=benchmark.missing,
        ratios=ratios,
        goals=evaluate_goals(board, ratios, churned, filled),
    )


def open_benchmark(
    arguments: argparse.Namespace, entrance: SystemFactory, ours: StreamingSystem
) -> GenerationBenchmark:
    """Everybody who takes part, ready to begin."""
    others, missing = open_baselines(entrance, arguments.without)
    has_levels = STREAM_PARTS in arguments.parts
    return GenerationBenchmark(
        ours=ours,
        others=others,
        missing=missing,
        book=PromptSampler.of(entrance.model, arguments.seed),
        rng=random.Random(arguments.seed),
        streams=tuple(sorted(set(arguments.streams))) if has_levels else (),
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        scenarios=[SCENARIOS[p](entrance.context) for p in arguments.parts if p in SCENARIOS],
    )


def check_room(arguments: argparse.Namespace, context: int) -> None:
    """Raises BenchmarkError when a prompt and its answer are more than the model reads."""
    wanted = arguments.prompt_tokens + arguments.new_tokens
    if wanted > context:
        raise BenchmarkError(
            f"prompts and answers of {wanted} tokens do not fit into {context}",
            hint="ask for fewer with --prompt-tokens N and --new-tokens N",
        )
