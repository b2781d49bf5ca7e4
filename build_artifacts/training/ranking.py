r"""Training of `minilm-rerank-lora` on questions with their passages, against hard negatives.

    python -m build_artifacts.training.ranking MINILM TRAIN_JSONL TEST_JSONL DIRECTORY \
        --start build_artifacts/adapters/minilm-squad-lora

With `--measure`, the command measures the adapter in DIRECTORY and does not train. A line of the
JSONL files has `question` and `passage`. The negatives of a question are other passages of the same
file. Training uses passages whose embeddings are near the question. The test reranks the five
nearest of all passages.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.evaluation.metrics import rank_documents, reciprocal_rank
from build_artifacts.training.embeddings import embed
from build_artifacts.training.lora import LoraSettings, PairClassifier
from build_artifacts.types import TorchTensor

_QUESTIONS = 4  # questions per training step
_NEGATIVES = 3  # negative passages per question
_HARD = 20  # number of nearest passages from which negatives are drawn
_RERANKED = 5  # passages per question in the test, the nearest by embeddings
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions and passages.

    `answers` has the index of the passage that answers each question. `similarities` are the
    cosines of the embeddings, [questions, passages].
    """

    questions: tuple[str, ...]
    answers: tuple[int, ...]
    passages: tuple[str, ...]
    similarities: NDArray[np.float32]

    @classmethod
    def read(cls, path: Path, base: Path) -> Questions:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        passages = tuple(dict.fromkeys(record["passage"] for record in records))
        questions = tuple(record["question"] for record in records)
        indices = {passage: i for i, passage in enumerate(passages)}
        answers = tuple(indices[record["passage"]] for record in records)
        similarities = embed(base, questions) @ embed(base, passages).T
        return cls(questions, answers, passages, similarities)

    def nearest(self, question: int, count: int) -> list[int]:
        """Return the indices of the nearest passages, nearest first."""
        return [int(i) for i in np.argsort(-self.similarities[question])[:count]]


def sample_groups(data: Questions) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield batches of questions with passages, without end.

    The first passage of a question answers it. The others are hard negatives.
    """
    rng = random.Random(0)
    while True:
        order = list(range(len(data.questions)))
        rng.shuffle(order)
        for start in range(0, len(order) - _QUESTIONS + 1, _QUESTIONS):
            yield [_sample_group(data, i, rng) for i in order[start : start + _QUESTIONS]]


def _sample_group(data: Questions, question: int, rng: random.Random) -> tuple[str, list[str]]:
    answer = data.answers[question]
    hard = [i for i in data.nearest(question, _HARD) if i != answer]
    chosen = [answer, *rng.sample(hard, _NEGATIVES)]
    return data.questions[question], [data.passages[i] for i in chosen]


def train(classifier: PairClassifier, data: Questions) -> None:
    """Train the adapter to score the answering passage above the other passages of a group."""
    import torch

    def loss(batch: list[tuple[str, list[str]]]) -> TorchTensor:
        pairs = [(question, passage) for question, passages in batch for passage in passages]
        scores = classifier.logits(pairs).reshape(len(batch), -1)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(len(batch), dtype=torch.long))

    classifier.fit(sample_groups(data), loss)


def measure(classifier: PairClassifier, data: Questions) -> dict[str, float | tuple[float, float]]:
    """Return MRR and top-1 accuracy in the order of the embeddings, and after reranking.

    The result also has an interval of each gain by reranking, from `bootstrap_gain`.
    """
    nearest = [data.nearest(i, _RERANKED) for i in range(len(data.questions))]
    pairs = [(data.questions[i], data.passages[j]) for i, row in enumerate(nearest) for j in row]
    scores = classifier.predict(pairs)[:, 0].reshape(len(nearest), -1).tolist()
    plain = [[-float(rank) for rank in range(len(row))] for row in nearest]
    values: dict[tuple[str, str], NDArray[np.float64]] = {}  # one value per question
    for name, rows in (("embeddings", plain), ("reranked", scores)):
        hits = [
            rank_documents(row, frozenset(_positions(passages, data.answers[i])))
            for i, (row, passages) in enumerate(zip(rows, nearest, strict=True))
        ]
        values[name, "mrr"] = np.array([reciprocal_rank(order) for order in hits])
        values[name, "first"] = np.array([float(order[0]) for order in hits])
    result: dict[str, float | tuple[float, float]] = {
        f"{name} {metric}": float(each.mean()) for (name, metric), each in values.items()
    }
    for metric in ("mrr", "first"):
        gains = values["reranked", metric] - values["embeddings", metric]
        result[f"gain {metric}, 95 % interval"] = bootstrap_gain(gains)
    return result


def bootstrap_gain(gains: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired gains, by a seeded percentile bootstrap."""
    drawn = np.random.default_rng(0).integers(len(gains), size=(_RESAMPLES, len(gains)))
    low, high = np.percentile(gains[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _positions(passages: Sequence[int], answer: int) -> list[int]:
    return [i for i, passage in enumerate(passages) if passage == answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("minilm", "train", "test", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--start", type=Path, help="adapter to continue from")
    parser.add_argument(
        "--measure", action="store_true", help="measure the adapter in DIRECTORY, train none"
    )
    arguments = parser.parse_args()
    test = Questions.read(arguments.test, arguments.minilm)
    settings = LoraSettings(
        labels=("relevance",),
        max_tokens=128,
        learning_rate=5e-4,
        steps=arguments.steps,
        start=arguments.start,
    )
    classifier = PairClassifier(arguments.minilm, settings)
    if arguments.measure:
        classifier.load(arguments.directory)
    else:
        train(classifier, Questions.read(arguments.train, arguments.minilm))
        classifier.save(arguments.directory)
    print(measure(classifier, test))


if __name__ == "__main__":
    main()
