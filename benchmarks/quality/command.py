"""Accuracy of the HTTP API: STS-B Spearman correlation, SST-2 accuracy, SQuAD F1.

Texts are sent to a running server, several per request, so that the metrics cover HTTP, routing and
batching.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress
from benchmarks.common.options import add_common_options, add_url_option
from benchmarks.common.report import Table, log_progress, publish, start_run
from benchmarks.common.sentences import (
    DEFAULT_DATA,
    SQUAD_NAME,
    SST2_NAME,
    STSB_NAME,
    LabeledText,
    read_answerable_questions,
    read_labeled_texts,
    read_scored_pairs,
)
from build_artifacts.evaluation.metrics import accuracy, row_cosines, spearman
from build_artifacts.evaluation.similarity import ScoredPair
from build_artifacts.evaluation.squad import SquadQuestion, exact_match, overlap_f1
from deployments.artifacts.types import TaskName

DEFAULT_CLASSIFIER = "hundredfold/minilm-sst2"
DEFAULT_READER = "hundredfold/minilm-squad"
TEXTS_PER_REQUEST = 64
SENTIMENTS = ("negative", "positive")  # meaning of the labels 0 and 1 of SST-2


@dataclass(frozen=True, slots=True)
class Score:
    metric: str
    data: str
    value: float
    examples: int
    model: Mapping[str, Any]  # body of GET /models/{id}
    compute_type: str | None


@dataclass(frozen=True, slots=True)
class ServedModelClient:
    """Client of one model of a running server."""

    client: Client
    model_id: str
    use_gpu: bool

    def describe(self) -> dict[str, Any]:
        return self.client.describe_model(self.model_id)

    def compute_type(self, task: str, inputs: Any = "warm-up") -> str | None:
        """Send one request. Return the served device and precision, such as `cpu-int8`."""
        response = self.client.infer(task, self.model_id, [inputs], use_gpu=self.use_gpu)
        return response.compute_type

    def answers(self, task: str, inputs: Sequence[Any]) -> Iterator[Any]:
        """Yield one answer per input. Raises BenchmarkError if a response has more or fewer."""
        for start in range(0, len(inputs), TEXTS_PER_REQUEST):
            chunk = list(inputs[start : start + TEXTS_PER_REQUEST])
            value = self.client.infer(task, self.model_id, chunk, use_gpu=self.use_gpu).value
            if not isinstance(value, list) or len(value) != len(chunk):
                raise BenchmarkError(
                    f"`{self.model_id}` did not return {len(chunk)} answers to {len(chunk)} texts",
                    hint="check that a Hundredfold server listens at --url",
                )
            yield from value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_option(parser)
    add_common_options(parser)
    parser.add_argument(
        "--classifier",
        default=DEFAULT_CLASSIFIER,
        metavar="ID",
        help="a model with two labels, the negative one first (default: %(default)s)",
    )
    parser.add_argument(
        "--reader",
        default=DEFAULT_READER,
        metavar="ID",
        help="a question-answering model (default: %(default)s)",
    )
    parser.add_argument(
        "--squad",
        type=Path,
        metavar="FILE",
        help=f"questions in the SQuAD format; default: {SQUAD_NAME} of --data, if it exists",
    )
    parser.add_argument(
        "--use-gpu", action="store_true", help="send the requests to the GPU encoder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compute the metrics and write the results.

    Skip SQuAD if `--squad` is not given and the default file is missing. Raises BenchmarkError if
    another data file is missing or a request fails.
    """
    metadata = start_run("quality", arguments.command_line, arguments.seed)
    data: Path = arguments.data or DEFAULT_DATA
    pairs = read_scored_pairs(data / STSB_NAME)
    labeled = read_labeled_texts(data / SST2_NAME)
    squad = find_squad(arguments.squad, data)
    questions = read_answerable_questions(squad) if squad else []
    with Client(ServerAddress.parse(arguments.url)) as client:
        scores = [
            score_similarity(ServedModelClient(client, arguments.model, arguments.use_gpu), pairs),
            score_sentiment(
                ServedModelClient(client, arguments.classifier, arguments.use_gpu), labeled
            ),
        ]
        if squad:
            reader = ServedModelClient(client, arguments.reader, arguments.use_gpu)
            scores += score_answers(reader, squad.name, questions)
    publish(arguments, metadata, {"scores": scores}, [build_table(scores)])
    return 0


def score_similarity(served: ServedModelClient, pairs: Sequence[ScoredPair]) -> Score:
    """Compute the Spearman correlation between embedding cosines and human scores."""
    task = TaskName.FEATURE_EXTRACTION
    texts = [text for pair in pairs for text in (pair.left, pair.right)]
    log_progress(f"{served.model_id}: {len(texts)} sentences")
    vectors = np.array(list(served.answers(task, texts)), dtype=np.float32)
    value = spearman(row_cosines(vectors[0::2], vectors[1::2]), [pair.score for pair in pairs])
    return Score(
        "Spearman", STSB_NAME, value, len(pairs), served.describe(), served.compute_type(task)
    )


def score_sentiment(served: ServedModelClient, labeled: Sequence[LabeledText]) -> Score:
    """Compute the share of sentences whose label with the highest score is correct."""
    task = TaskName.TEXT_CLASSIFICATION
    model = served.describe()
    log_progress(f"{served.model_id}: {len(labeled)} sentences")
    answers = served.answers(task, [example.text for example in labeled])
    best = [str(answer[0]["label"]) for answer in answers]
    labels = list(model.get("labels", ()))
    if len(labels) != len(SENTIMENTS):
        raise BenchmarkError(
            f"`{served.model_id}` has {len(labels)} labels; SST-2 requires {len(SENTIMENTS)}",
            hint="name a sentiment model with --classifier ID",
        )
    value = accuracy(best, [labels[example.label] for example in labeled])
    return Score("accuracy", SST2_NAME, value, len(labeled), model, served.compute_type(task))


def find_squad(named: Path | None, data: Path) -> Path | None:
    """Return `named` if it is given, else the default file in `data`.

    Return None if `named` is not given and the default file does not exist.
    """
    path = named or data / SQUAD_NAME
    if named or path.is_file():
        return path
    log_progress(f"{path} does not exist: skipping question answering; see --squad FILE")
    return None


def score_answers(
    served: ServedModelClient, data: str, questions: Sequence[SquadQuestion]
) -> list[Score]:
    """Request the best answer to each question, and compute SQuAD's F1 and exact match."""
    task = TaskName.QUESTION_ANSWERING
    log_progress(f"{served.model_id}: {len(questions)} questions")
    inputs = [{"question": q.question, "context": q.context} for q in questions]
    answers = [str(answer["answer"]) for answer in served.answers(task, inputs)]
    model, compute_type = served.describe(), served.compute_type(task, inputs[0])
    return [
        Score(
            metric,
            data,
            float(np.mean([score(a, q.golds) for a, q in zip(answers, questions, strict=True)])),
            len(questions),
            model,
            compute_type,
        )
        for metric, score in (("F1", overlap_f1), ("exact match", exact_match))
    ]


def build_table(scores: Sequence[Score]) -> Table:
    header = ("data", "metric", "value", "examples", "model", "compute type")
    rows = [
        [score.data, score.metric, f"{score.value:.4f}", str(score.examples),
         str(score.model["id"]), score.compute_type or "-"]
        for score in scores
    ]  # fmt: skip
    return Table("scores", header, rows)
