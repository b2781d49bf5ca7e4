"""Evaluation of feature-extraction and sentence-similarity: similarities compared with scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from build_artifacts.evaluation.base import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    Output,
    ReducedOutput,
    tokenize_texts,
)
from build_artifacts.evaluation.files import FileLayout, FileLocation, as_number, read_records
from build_artifacts.evaluation.metrics import multiply_rows, row_cosines, spearman
from deployments.messages import TokenizedItem
from deployments.tasks.embedding import prepare_vectors

EXPECTED = "`sentence1`, `sentence2` and `score`: tab-separated columns, or JSON lines in a .jsonl"
LAYOUT = FileLayout(
    names={
        "sentence1": ("sentence1",),
        "sentence2": ("sentence2",),
        "score": ("score", "label", "similarity"),
    },
    required=frozenset(("sentence1", "sentence2", "score")),
    orders=(("sentence1", "sentence2", "score"), ("score", "sentence1", "sentence2")),
    key="score",
    fits=lambda cell: as_number(cell) is not None,
)


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two sentences and the similarity that annotators assigned, on any scale."""

    left: str
    right: str
    score: float


def read_pairs(path: Path) -> list[ScoredPair]:
    """Read the pairs of a file. Raises BadEvaluationData for an unusable file."""
    return [
        ScoredPair(record.text("sentence1"), record.text("sentence2"), record.number("score"))
        for record in read_records(FileLocation(path, EXPECTED), LAYOUT)
    ]


def load_similarity(path: Path, model: EvaluatedModel, sampling: ExampleSampling) -> Evaluation:
    """Load two items per pair. Raises BadEvaluationData for an unusable file."""
    pairs = sampling.sample(read_pairs(path))
    scores = [pair.score for pair in pairs]
    if len(set(scores)) < 2:
        raise FileLocation(path, EXPECTED).data_error("all scores are equal, so they have no order")
    texts = [model.prompt + text for pair in pairs for text in (pair.left, pair.right)]
    return SimilarityEvaluation(tokenize_texts(model, texts), scores, model)


class SimilarityEvaluation(Evaluation):
    """Items 2i and 2i + 1 form pair i. `spearman` compares the similarities with the scores."""

    def __init__(
        self,
        items: Sequence[TokenizedItem],
        scores: Sequence[float],
        model: EvaluatedModel,
    ) -> None:
        super().__init__(items, "spearman")
        self._scores = scores
        self._compare = row_cosines if model.similarity == "cosine" else multiply_rows
        self._model = model

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        """Return `spearman`, from -1 to 1."""
        similarities = self._compare(np.stack(reduced[0::2]), np.stack(reduced[1::2]))
        return {"spearman": spearman(similarities, self._scores)}

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        width = self._model.default_dimensions
        vectors = prepare_vectors(output[np.newaxis], width, normalizes=self._model.normalize)
        return vectors[0, :width].copy()
