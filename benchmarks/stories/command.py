"""Stories: benchmarks that measure the gain of each technique.

Story a adds one technique after the other to a naive deployment. Story b takes a question-answering
model from PyTorch to int8, stage by stage. Story c runs a GPT-2 with and without IO binding and KV
cache.

Each story starts the servers that it needs. It writes a result file with tables, and plots.
`hundredfold bench tables` copies tables from the files in docs/results to docs/stories.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.options import (
    DEFAULT_GENERATOR,
    DEFAULT_MODEL,
    add_rounds_option,
    add_run_options,
)
from benchmarks.common.report import RunMetadata, Table, log_progress, publish, start_run
from benchmarks.common.sentences import (
    DEFAULT_DATA,
    SQUAD_NAME,
    load_sentences,
    read_answerable_questions,
)
from benchmarks.generation.results import AnswerAgreement
from benchmarks.quality.command import DEFAULT_READER
from benchmarks.servers.processes import stop_signals_interrupt
from benchmarks.stories import decoding, served_stages, techniques
from benchmarks.stories.encoder_steps import compare_embeddings, open_encoder_steps
from benchmarks.stories.stages import (
    GPU_STAGE,
    StagePlan,
    list_stages,
    seal_stages,
    write_questions,
)
from build_artifacts.demo import find_demo_model
from build_artifacts.errors import SourceNotFound
from build_artifacts.pruning.prune import Pruning
from deployments.artifacts.types import TaskName
from deployments.host.machine import usable_cores
from deployments.terminal.command_line import positive_number
from deployments.terminal.console import add_store_option

DEFAULT_PRUNING = 0.2
# Maximum drop of F1 from the original model to a stage, in points (hundredths).
DEFAULT_MAX_DROP = 5.0
NO_NOTE = "not stated"


class Story(NamedTuple):
    """How to run a story: functions that measure it, build its tables, plot it and check it."""

    measure: Callable[[argparse.Namespace, Path], Any]
    build_tables: Callable[[Any], Sequence[Table]]
    plot: Callable[[Path, RunMetadata, Any], list[Path]]
    # Raises BenchmarkError for wrong answers, after the results are written. Story b has F1
    # instead, and story c compares logits before it measures.
    require_correct: Callable[[Any], None] = lambda _results: None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=tuple(PARTS), help="the story")
    add_store_option(parser)
    add_run_options(parser)
    add_rounds_option(parser)
    parser.add_argument(
        "--embedder", default=DEFAULT_MODEL, metavar="ID", help="of story a; default: %(default)s"
    )
    parser.add_argument(
        "--generator",
        default=DEFAULT_GENERATOR,
        metavar="ID",
        help="of story a; empty: leave generation out; default: %(default)s",
    )
    parser.add_argument(
        "--reader", default=DEFAULT_READER, metavar="ID", help="of story b; default: %(default)s"
    )
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="that the build of the reader merged"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help=f"directory of {SQUAD_NAME} and stsb-test.tsv"
    )
    parser.add_argument(
        "--prune", type=fraction, default=DEFAULT_PRUNING, metavar="FRACTION", help="of story b"
    )
    parser.add_argument(
        "--max-drop",
        type=positive_number,
        default=DEFAULT_MAX_DROP,
        metavar="POINTS",
        help="of F1, for each stage of story b; default: %(default)s",
    )
    parser.add_argument(
        "--note",
        default=NO_NOTE,
        help="what else ran on the machine (default: %(default)s)",
    )
    parser.add_argument("--no-server", action="store_true", help="leave the server of story a out")


def fraction(text: str) -> float:
    """Parse a number between 0 and 1, both excluded, for argparse."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must be a number between 0 and 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure one story and write the results.

    Raises ServeError if the story fails, or if answers are wrong.
    """
    part = PARTS[arguments.part]
    metadata = start_run(f"story_{arguments.part}", arguments.command_line, arguments.seed)
    with stop_signals_interrupt(), tempfile.TemporaryDirectory(prefix="stories-") as directory:
        results = part.measure(arguments, Path(directory))
    publish(arguments, metadata, results, part.build_tables(results))
    for path in part.plot(arguments.out, metadata, results):
        log_progress(f"wrote {path}")
    part.require_correct(results)
    return 0


def measure_techniques(arguments: argparse.Namespace, scratch: Path) -> techniques.TechniqueResults:
    sentences = load_sentences(arguments.data, arguments.seed)
    texts = techniques.sample_requests(sentences.texts, techniques.REQUESTS, arguments.seed)
    model = LocalModel.open(arguments.store, arguments.embedder)
    work = scratch / "encoder"
    work.mkdir()
    with open_encoder_steps(model, arguments.store, work, texts) as steps:
        rates = techniques.run_rounds(techniques.build_measurements(steps, texts), arguments.rounds)
        embedding = tuple(techniques.StepRate(s.name, s.what, rates[s.name]) for s in steps)
        checks = compare_embeddings(steps, texts)
    generation: tuple[techniques.StepRate, ...] = ()
    agreements: tuple[AnswerAgreement, ...] = ()
    if arguments.generator:
        generator = LocalModel.open(arguments.store, arguments.generator)
        unpacked = scratch / "generator"
        unpacked.mkdir()
        generation, agreements = techniques.measure_generation(
            generator, unpacked, arguments.rounds, arguments.seed
        )
    served = None
    if not arguments.no_server:
        served, check = techniques.measure_served(model, texts, arguments, scratch)
        checks = (*checks, check)
    return techniques.TechniqueResults(
        embedder=model.manifest.id,
        generator=arguments.generator or None,
        sentences=sentences.origin,
        requests=len(texts),
        distinct=len(set(texts)),
        note=arguments.note,
        embedding=embedding,
        generation=generation,
        served_per_s=served,
        checks=checks,
        agreements=agreements,
    )


def measure_stages(arguments: argparse.Namespace, scratch: Path) -> served_stages.StageResults:
    """Build, serve and measure all stages of a question-answering model.

    Pruning uses the questions of the demo model. F1 is computed on the SQuAD file in `--data`.
    Without `--data`, F1 is computed on the file in the default directory or, if this file is
    missing, on the questions of the demo model.
    """
    model = LocalModel.open(arguments.store, arguments.reader)
    if model.manifest.tasks[0] != TaskName.QUESTION_ANSWERING:
        raise BenchmarkError(
            f"`{model.manifest.id}` does not answer questions", hint="name one with --reader ID"
        )
    calibration = find_calibration()
    held_out = (arguments.data or DEFAULT_DATA) / SQUAD_NAME
    data = held_out if arguments.data or held_out.is_file() else calibration
    questions = read_answerable_questions(data)
    plan = StagePlan(
        manifest=model.manifest,
        adapter=arguments.adapter,
        pruning=Pruning(fraction=arguments.prune, data=calibration),
        evaluation=write_questions(questions, scratch / "questions.json"),
        max_drop=arguments.max_drop,
    )
    store = scratch / "store"
    stages, refused = seal_stages(plan, scratch, store)
    lengths = [n for n in served_stages.LENGTHS if n <= model.manifest.max_tokens]
    measured = served_stages.measure_stages(
        stages, store, questions, data.name, lengths, arguments.out
    )
    return served_stages.StageResults(
        model_id=model.manifest.id,
        pruned=arguments.prune,
        data=data.name,
        calibration=calibration.name,
        questions=len(questions),
        threads=usable_cores(),
        note=arguments.note,
        stages=(
            *measured,
            *(served_stages.describe_unmeasured(*item) for item in refused.items()),
            *(() if GPU_STAGE in list_stages() else (served_stages.FP16,)),
        ),
    )


def find_calibration() -> Path:
    """Return the file with the evaluation questions of the demo model."""
    path = find_demo_model(DEFAULT_READER).evaluation
    if path is None:
        raise SourceNotFound(f"`{DEFAULT_READER}` has no questions", hint="this is a bug")
    return path


def measure_decoding(arguments: argparse.Namespace, _scratch: Path) -> decoding.DecodingResults:
    return decoding.measure_decoding(
        decoding.GPT2,
        decoding.CONTEXTS,
        threads=usable_cores(),
        rounds=arguments.rounds,
        seed=arguments.seed,
        note=arguments.note,
    )


PARTS: Mapping[str, Story] = {
    "a": Story(
        measure_techniques,
        techniques.build_tables,
        techniques.plot_techniques,
        techniques.require_correct,
    ),
    "b": Story(measure_stages, served_stages.build_tables, served_stages.plot_stages),
    "c": Story(measure_decoding, decoding.build_tables, decoding.plot_decoding),
}
