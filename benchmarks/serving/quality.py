"""Task metrics through the HTTP API: STS-B Spearman correlation, SST-2 accuracy, SQuAD F1.

What a client gets, not what the engine computes: texts travel as JSON in batches and every layer
of the cluster takes part.
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
from benchmarks.common.report import log_progress, start_run, write_result
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
from build_artifacts.console import columns
from build_artifacts.evaluation.metrics import accuracy, row_cosines, spearman
from build_artifacts.evaluation.similarity import ScoredPair
from build_artifacts.evaluation.squad import SquadQuestion, exact_match, overlap_f1
from deployments.artifacts.types import TaskName

DEFAULT_CLASSIFIER = "hundredfold/minilm-sst2"
DEFAULT_READER = "hundredfold/minilm-squad"
TEXTS_PER_REQUEST = 64
SENTIMENTS = ("negative", "positive")  # what the labels 0 and 1 of SST-2 mean


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one model on one data set."""

    metric: str
    data: str
    value: float
    examples: int
    model: Mapping[str, Any]  # as the server describes it
    compute_type: str | None


@dataclass(frozen=True, slots=True)
class ServedModelClient:
    """One model of a running cluster."""

    client: Client
    model_id: str
    use_gpu: bool

    def describe(self) -> dict[str, Any]:
        """What the server says of the model."""
        return self.client.describe_model(self.model_id)

    def compute_type(self, task: TaskName, inputs: Any = "warm-up") -> str | None:
        """What answers, such as `cpu-int8`."""
        reply = self.client.infer(task, self.model_id, [inputs], use_gpu=self.use_gpu)
        return reply.compute_type

    def answers(self, task: TaskName, inputs: Sequence[Any]) -> Iterator[Any]:
        """One answer per input. Raises BenchmarkError."""
        for start in range(0, len(inputs), TEXTS_PER_REQUEST):
            part = list(inputs[start : start + TEXTS_PER_REQUEST])
            value = self.client.infer(task, self.model_id, part, use_gpu=self.use_gpu).value
            if not isinstance(value, list) or len(value) != len(part):
                raise BenchmarkError(
                    f"`{self.model_id}` did not answer {len(part)} texts with as many answers",
                    hint="check what listens at --url",
                )
            yield from value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks quality`."""
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
        help="a model that answers questions (default: %(default)s)",
    )
    parser.add_argument(
        "--squad",
        type=Path,
        metavar="FILE",
        help=f"questions in the SQuAD format; default: {SQUAD_NAME} of --data, if it is there",
    )
    parser.add_argument("--use-gpu", action="store_true", help="ask for the GPU encoder")


def run(arguments: argparse.Namespace) -> int:
    """All metrics there is data for. Raises BenchmarkError."""
    command: str = arguments.command_line
    facts = start_run("quality", command, arguments.seed)
    data: Path = arguments.data or DEFAULT_DATA
    pairs = read_scored_pairs(data / STSB_NAME)
    labelled = read_labeled_texts(data / SST2_NAME)
    squad = find_squad(arguments.squad, data)
    questions = read_answerable_questions(squad) if squad else []
    with Client(ServerAddress.parse(arguments.url)) as client:
        scores = [
            score_similarity(ServedModelClient(client, arguments.model, arguments.use_gpu), pairs),
            score_sentiment(
                ServedModelClient(client, arguments.classifier, arguments.use_gpu), labelled
            ),
        ]
        if squad:
            reader = ServedModelClient(client, arguments.reader, arguments.use_gpu)
            scores += score_answers(reader, squad.name, questions)
    print(describe(scores))
    print(write_result(arguments.out, facts, {"scores": scores}))
    return 0


def score_similarity(served: ServedModelClient, pairs: Sequence[ScoredPair]) -> Score:
    """Spearman correlation of the cosine of two embeddings with what people said."""
    task = TaskName.FEATURE_EXTRACTION
    texts = [text for pair in pairs for text in (pair.left, pair.right)]
    log_progress(f"{served.model_id}: {len(texts)} sentences")
    vectors = np.array(list(served.answers(task, texts)), dtype=np.float32)
    value = spearman(row_cosines(vectors[0::2], vectors[1::2]), [pair.score for pair in pairs])
    return Score(
        "Spearman", STSB_NAME, value, len(pairs), served.describe(), served.compute_type(task)
    )


def score_sentiment(served: ServedModelClient, labelled: Sequence[LabeledText]) -> Score:
    """Share of sentences whose best label is the right one."""
    task = TaskName.TEXT_CLASSIFICATION
    model = served.describe()
    log_progress(f"{served.model_id}: {len(labelled)} sentences")
    answers = served.answers(task, [example.text for example in labelled])
    best = [str(answer[0]["label"]) for answer in answers]
    labels = list(model.get("labels", ()))
    if len(labels) != len(SENTIMENTS):
        raise BenchmarkError(
            f"`{served.model_id}` has {len(labels)} labels, not {len(SENTIMENTS)}",
            hint="name a sentiment model with --classifier ID",
        )
    value = accuracy(best, [labels[example.label] for example in labelled])
    return Score("accuracy", SST2_NAME, value, len(labelled), model, served.compute_type(task))


def find_squad(named: Path | None, data: Path) -> Path | None:
    """The file with the questions: the one that was named, else the default one if it is there."""
    path = named or data / SQUAD_NAME
    if named or path.is_file():
        return path
    log_progress(f"no {path}: questions are left out; name a file with --squad FILE")
    return None


def score_answers(
    served: ServedModelClient, data: str, questions: Sequence[SquadQuestion]
) -> list[Score]:
    """SQuAD's F1 and exact match of the best answers, with the server's default parameters."""
    task = TaskName.QUESTION_ANSWERING
    log_progress(f"{served.model_id}: {len(questions)} questions")
    inputs = [{"question": asked.question, "context": asked.context} for asked in questions]
    answers = [str(answer["answer"]) for answer in served.answers(task, inputs)]
    model, compute_type = served.describe(), served.compute_type(task, inputs[0])
    return [
        Score(
            metric,
            data,
            float(np.mean([judge(a, q.golds) for a, q in zip(answers, questions, strict=True)])),
            len(questions),
            model,
            compute_type,
        )
        for metric, judge in (("F1", overlap_f1), ("exact match", exact_match))
    ]


def describe(scores: Sequence[Score]) -> str:
    """The result for people."""
    header = ["data", "metric", "value", "examples", "model", "ran on"]
    rows = [
        [score.data, score.metric, f"{score.value:.4f}", str(score.examples),
         str(score.model["id"]), score.compute_type or "-"]
        for score in scores
    ]  # fmt: skip
    return columns([header, *rows], right=True)
