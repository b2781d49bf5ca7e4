"""Benchmark of text generation: tokens/s and latencies in process, over HTTP and of other engines.

All systems get the same prompts and decode the same number of tokens greedily. Every round measures
all systems: first with one stream, then with four, and so on, then in the scenarios. A change of
the machine's speed thus affects all systems equally.
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
    DEFAULT_GENERATOR,
    add_rounds_option,
    add_run_options,
    add_url_option,
)
from benchmarks.common.report import publish, start_run
from benchmarks.common.source_checkpoint import SourceCheckpoint
from benchmarks.generation.http_system import HttpGenerator
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.results import (
    MIN_LEADING_TOKENS,
    AnswerAgreement,
    GenerationResults,
    RatioTable,
    build_tables,
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
from deployments.host.machine import installed_versions, usable_cores
from deployments.terminal.command_line import positive_count
from deployments.terminal.console import add_store_option

STREAMS_PART, CHURN, STRUCTURED_OUTPUT = "streams", "churn", "structured-output"
PARTS = (STREAMS_PART, *SCENARIOS, CHURN, STRUCTURED_OUTPUT)
PACKAGES = ("onnxruntime-genai", "llama-cpp-python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_GENERATOR, metavar="ID", help="default: %(default)s"
    )
    add_store_option(parser)
    add_url_option(parser)
    add_run_options(parser)
    add_rounds_option(parser)
    counts = {
        "--new-tokens": (64, "tokens of each answer"),
        "--prompt-tokens": (64, "tokens of each prompt"),
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
    _add_baseline_options(parser)


def _add_baseline_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip", nargs="+", choices=tuple(BASELINES), default=(), help="systems to leave out"
    )
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help="checkpoint of the baselines, as for `hundredfold build`; default: the source of "
        "the artifact",
    )
    genai = parser.add_mutually_exclusive_group()  # a precision has no effect on a built model
    genai.add_argument(
        "--genai",
        type=Path,
        metavar="DIR",
        help="output of onnxruntime-genai's model builder; default: run the builder",
    )
    genai.add_argument(
        "--genai-precision",
        choices=("int4", "int8", "fp32"),
        help="precision for onnxruntime-genai's model builder; default: that of the artifact",
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results.

    Baselines that fail are left out. Raises ServeError if the generator in this process fails, or
    if `require_correct` rejects the results.
    """
    metadata = start_run("generation", arguments.command_line, arguments.seed)
    with ExitStack() as stack:
        results = measure(arguments, stack)
    publish(arguments, metadata, results, build_tables(results), text=describe(results))
    require_correct(results)
    return 0


def measure(arguments: argparse.Namespace, stack: ExitStack) -> GenerationResults:
    """Run all rounds and repeat sampled prompts unbatched.

    Then run `churn` and `structured-output`, if they are among the selected parts.
    Raises ServeError if the model or its generator in this process fails.
    """
    model = LocalModel.open(arguments.store, arguments.model)
    threads, kv_slots = usable_cores(), max(STREAMS, *arguments.streams)
    runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
    generator = InProcessGenerator(
        model, kv_slots=kv_slots, threads=threads, events=runner.get_loop()
    )
    stack.callback(generator.close)
    require_context(arguments, generator.context)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    checkpoint = SourceCheckpoint(model, arguments.source, scratch)
    factory = SystemFactory(
        arguments=arguments,
        model=model,
        checkpoint=checkpoint,
        runner=runner,
        stack=stack,
        kv_slots=kv_slots,
        threads=threads,
        context=generator.context,
    )
    in_process = StreamingSystem(IN_PROCESS, generator, runner)
    benchmark = open_benchmark(arguments, factory, in_process)
    benchmark.warm_up()
    for round_number in range(1, arguments.rounds + 1):
        benchmark.run_round(f"round {round_number}/{arguments.rounds}")
    invariance = repeat_unbatched(benchmark)
    churn_results: ChurnResults | None = None
    if CHURN in arguments.parts:
        churn_results = runner.run(
            churn(generator, benchmark.prompts, benchmark.rng, arguments.churn, kv_slots)
        )
    schema_results: SchemaResults | None = None
    if STRUCTURED_OUTPUT in arguments.parts:
        schema_results = answer_schemas(benchmark, arguments.seed)
    return build_results(factory, benchmark, invariance, churn_results, schema_results)


def answer_schemas(benchmark: GenerationBenchmark, seed: int) -> SchemaResults | None:
    """Run the schema tasks over HTTP. Return None if the HTTP system is skipped or was dropped."""
    for system in benchmark.baselines:
        if isinstance(system, StreamingSystem) and isinstance(system.generator, HttpGenerator):
            tasks = build_schema_tasks(random.Random(seed))
            return system.runner.run(answer_all(system.generator, tasks))
    return None


def build_results(
    factory: SystemFactory,
    benchmark: GenerationBenchmark,
    invariance: AnswerAgreement | None,
    churn_results: ChurnResults | None,
    schema_results: SchemaResults | None,
) -> GenerationResults:
    agreements = benchmark.compare_answers()
    incomparable = {name: each for name, each in agreements.items() if not each.is_comparable}
    table = RatioTable((*benchmark.stream_results, *benchmark.scenario_results), incomparable)
    ratios = table.ratios()
    return GenerationResults(
        model_id=factory.model.manifest.id,
        version=factory.model.manifest.version,
        compute_type=factory.model.compute_type,
        threads=factory.threads,
        prompt_tokens=benchmark.prompt_tokens,
        new_tokens=benchmark.new_tokens,
        streams=benchmark.stream_results,
        scenarios=benchmark.scenario_results,
        churn=churn_results,
        structured_output=schema_results,
        batch_invariance=invariance,
        answer_agreements=tuple(agreements.values()),
        notes=(*factory.notes, *(explain_no_ratio(*item) for item in incomparable.items())),
        packages=installed_versions(PACKAGES),
        missing=benchmark.missing,
        ratios=ratios,
        goals=evaluate_goals(table, ratios, churn_results, schema_results),
    )


def explain_no_ratio(name: str, agreement: AnswerAgreement) -> str:
    if agreement.must_be_equal:
        reason = "its answers are not those of this process"
    elif agreement.leading_tokens is None:
        reason = "it returns texts without token ids, and may run another version"
    else:
        reason = f"fewer than {MIN_LEADING_TOKENS:g} leading tokens of its answers are equal"
    return f"no ratio to {name}: {reason}"


def open_benchmark(
    arguments: argparse.Namespace, factory: SystemFactory, in_process: StreamingSystem
) -> GenerationBenchmark:
    """Open the baselines that `--skip` does not name, and build the benchmark."""
    baselines, missing = open_baselines(factory, arguments.skip)
    has_streams = STREAMS_PART in arguments.parts
    return GenerationBenchmark(
        in_process=in_process,
        baselines=baselines,
        missing=missing,
        prompts=PromptSampler.open(factory.model, arguments.seed),
        rng=random.Random(arguments.seed),
        streams=tuple(sorted(set(arguments.streams))) if has_streams else (),
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        scenarios=[
            SCENARIOS[part](factory.context) for part in arguments.parts if part in SCENARIOS
        ],
        same_model=factory.same_model,
    )


def require_context(arguments: argparse.Namespace, context: int) -> None:
    """Raise BenchmarkError if a prompt and its answer together exceed `context` tokens."""
    tokens = arguments.prompt_tokens + arguments.new_tokens
    if tokens > context:
        raise BenchmarkError(
            f"a prompt and its answer have {tokens} tokens; the maximum is {context}",
            hint="lower --prompt-tokens N or --new-tokens N",
        )
