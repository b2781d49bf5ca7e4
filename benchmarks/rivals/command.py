"""Benchmark of other servers against Hundredfold, with the same client and the same texts.

Every round starts each rival (other server) in turn, in its own Python environment. A level is a
workload at a number of connections. At each level, the rival and Hundredfold are measured one after
the other. The server that is not measured idles.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path

from benchmarks.common.agreement import required_cosine
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    DEFAULT_GENERATOR,
    add_common_options,
    add_load_options,
    add_rounds_option,
)
from benchmarks.common.report import (
    RunMetadata,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.common.sentences import load_sentences
from benchmarks.common.statistics import RoundSummary
from benchmarks.rivals.answers import AnswerBounds, require_right
from benchmarks.rivals.apis import CompletionApi
from benchmarks.rivals.catalog import NOT_INSTALLABLE, RIVALS, SEALED, Rival
from benchmarks.rivals.environments import DEFAULT_ENVIRONMENTS, Environment
from benchmarks.rivals.materials import Materials
from benchmarks.rivals.raw_engine import RawEngineRates
from benchmarks.rivals.references import ReferenceCompletions, ReferenceEmbeddings, References
from benchmarks.rivals.results import (
    OURS,
    AnswerCheck,
    OurModel,
    RivalResults,
    build_tables,
    describe,
    plot_rivals,
    require_answered,
)
from benchmarks.rivals.rounds import Meter, RivalRounds
from benchmarks.rivals.summary import check_ours, summarize_if_any, summarize_rivals
from benchmarks.rivals.systems import (
    build_our_command,
    build_rival_command,
    list_our_apis,
    open_rival_environment,
)
from benchmarks.rivals.workloads import (
    GENERATION,
    WORKLOADS,
    TextSource,
    TextWorkload,
    build_workload,
)
from benchmarks.servers.processes import ServerProcess, run_server, stop_signals_interrupt
from cluster.default_config import CONFIG_HELP
from deployments.errors import ServeError
from deployments.plan.resolution import SEPARATOR
from deployments.terminal.console import add_store_option
from deployments.tokenization.encodings import open_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    add_store_option(parser)
    add_rounds_option(parser)
    parser.add_argument(
        "--rivals", nargs="+", choices=tuple(RIVALS), default=tuple(RIVALS), help="default: all"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=tuple(WORKLOADS),
        default=tuple(WORKLOADS),
        help="default: all",
    )
    add_load_options(parser, (1, 8, 64), seconds=5.0)
    parser.add_argument(
        "--environments",
        type=Path,
        default=DEFAULT_ENVIRONMENTS,
        metavar="DIR",
        help="Python environments of the rivals, created when missing (default: %(default)s)",
    )
    parser.add_argument(
        "--generator",
        default=DEFAULT_GENERATOR,
        metavar="ID",
        help=f"generative model for the workload `{GENERATION}` (default: %(default)s)",
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"settings of Hundredfold, whose models are replaced; {CONFIG_HELP}",
    )
    sources.add_argument(
        "--url", help="measure this running Hundredfold server instead of starting one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results.

    Rivals that fail are left out. If the run ends early, write the results of its complete rounds.

    Raises ServeError if Hundredfold does not start, or, after the results are written, if one of
    its requests failed or its answers are wrong.
    """
    metadata = start_run("rivals", arguments.command_line, arguments.seed)
    logs = (arguments.out / f"{metadata.stem}-logs").resolve()
    by_round: list[RivalResults] = []

    def publish_results(run: RunMetadata) -> None:
        for results in by_round[-1:]:
            publish(arguments, run, results, build_tables(results), text=describe(results))

    with (
        publish_at_end(metadata, publish_results),
        stop_signals_interrupt(),
        tempfile.TemporaryDirectory(prefix="rivals-") as scratch,
    ):
        for results in measure(arguments, Path(scratch), logs):
            by_round.append(results)
    for path in plot_rivals(arguments.out, metadata, results):
        log_progress(f"wrote {path}")
    require_answered(results)
    for model in results.models:
        require_right(model.id, model.check)
    return 0


def measure(arguments: argparse.Namespace, scratch: Path, logs: Path) -> Iterator[RivalResults]:
    """Prepare and run all rounds. Yield the results of all rounds so far after each one.

    Drop rivals that fail. Servers log to `logs`.
    """
    model = open_model(arguments, arguments.model)
    has_generation = GENERATION in arguments.workloads
    generator = open_generator(arguments) if has_generation else None
    materials = Materials(model, generator, scratch, logs)
    references = References(
        ReferenceEmbeddings.open(model, materials),
        None if generator is None else ReferenceCompletions.open(generator),
    )
    rounds = RivalRounds(
        ours=Meter(
            OURS,
            list_our_apis(model, generator),
            AnswerBounds(required_cosine(model, is_sealed=True), has_our_completions=True),
            lambda: start_ours(arguments, materials),
        ),
        rivals={},
        workloads=build_workloads(arguments, model),
        connections=sorted(set(arguments.connections)),
        window_s=arguments.seconds,
        references=references,
    )
    environments = prepare_rivals(arguments, rounds, materials)
    with closing(RawEngineRates(model, rounds.workloads)) as engine, rounds.ours.start() as server:
        for number in range(1, arguments.rounds + 1):
            engine.run_round(number)
            rounds.run_round(server, number)
            rates = engine.summarize()
            yield summarize_rounds(number, rounds, materials, environments, rates)


def open_model(arguments: argparse.Namespace, name: str) -> LocalModel:
    """Open a model of the store, in the version that the server at `--url` names, if it is given.

    Raises BenchmarkError if the server or the store lacks it.
    """
    if arguments.url is not None:
        with Client(ServerAddress.parse(arguments.url)) as client:
            version = client.describe_model(name).get("version")
        name = f"{name}{SEPARATOR}{version}"
    return LocalModel.open(arguments.store, name)


def open_generator(arguments: argparse.Namespace) -> LocalModel:
    """Open the generative model. Raises BenchmarkError if it is missing or invalid."""
    try:
        return open_model(arguments, arguments.generator)
    except BenchmarkError as exc:
        raise BenchmarkError(
            exc.message, hint=f"name a model with --generator, or omit `{GENERATION}`"
        ) from exc


def build_workloads(arguments: argparse.Namespace, model: LocalModel) -> list[TextWorkload]:
    """Build the workloads of `--workloads` from shuffled sentences."""
    sentences = list(load_sentences(arguments.data, arguments.seed).texts)
    random.Random(arguments.seed).shuffle(sentences)
    tokenizer = open_tokenizer(model.directory)
    source = TextSource(
        sentences,
        lambda text: len(tokenizer.encode(text).ids),
        model.manifest.max_tokens,
        random.Random(arguments.seed),
    )
    return [build_workload(name, source) for name in dict.fromkeys(arguments.workloads)]


def prepare_rivals(
    arguments: argparse.Namespace, rounds: RivalRounds, materials: Materials
) -> dict[str, Environment]:
    """Install environments, prepare materials, add the rivals to `rounds`. Drop rivals that fail.

    Leave out rivals whose API supports none of the workloads. Return the environments by rival.
    """
    environments: dict[str, Environment] = {}
    for name in dict.fromkeys(arguments.rivals):
        rival = RIVALS[name]
        if not any(
            w.is_generation == isinstance(rival.api, CompletionApi) for w in rounds.workloads
        ):
            continue
        try:
            environments[name] = open_rival_environment(rival, arguments.environments)
            build_rival_command(rival, environments[name], materials)
        except ServeError as exc:
            rounds.drop(name, exc.message)
            continue
        rounds.rivals[name] = Meter(
            name,
            [rival.api],
            AnswerBounds(required_cosine(materials.model, is_sealed=rival.computes_with == SEALED)),
            partial(start_rival, rival, environments[name], materials),
        )
    return environments


def start_rival(
    rival: Rival, environment: Environment, materials: Materials
) -> AbstractContextManager[ServerProcess]:
    command = build_rival_command(rival, environment, materials)
    return run_server(command, materials.logs, materials.scratch)


def start_ours(
    arguments: argparse.Namespace, materials: Materials
) -> AbstractContextManager[ServerProcess]:
    """Start Hundredfold, or use the running server at `--url`."""
    if arguments.url is not None:
        return nullcontext(ServerProcess(ServerAddress.parse(arguments.url)))
    models = [model for model in (materials.model, materials.generator) if model is not None]
    directory = materials.scratch / OURS
    command = build_our_command(arguments.config, arguments.store, models, directory)
    return run_server(command, materials.logs, materials.scratch)


def summarize_rounds(
    count: int,
    rounds: RivalRounds,
    materials: Materials,
    environments: Mapping[str, Environment],
    engine: Mapping[str, RoundSummary],
) -> RivalResults:
    """Check all answers and summarize the first `count` rounds, the ones that are complete."""
    checks = check_ours(rounds)
    return RivalResults(
        models=tuple(
            describe_model(model, checks[model is materials.generator])
            for model in (materials.model, materials.generator)
            if model is not None
        ),
        rounds=count,
        window_s=rounds.window_s,
        workloads={workload.name: workload.tokens for workload in rounds.workloads},
        engine=engine,
        idle_cores=summarize_if_any(rounds.ours.idle_cores),
        rivals=summarize_rivals(rounds, environments),
        missing={**rounds.missing, **NOT_INSTALLABLE},
    )


def describe_model(model: LocalModel, check: AnswerCheck) -> OurModel:
    return OurModel(
        id=model.manifest.id,
        version=model.manifest.version,
        compute_type=model.compute_type,
        is_generative=model.manifest.generation_config is not None,
        check=check,
    )
