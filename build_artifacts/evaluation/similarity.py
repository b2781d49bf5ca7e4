"""Evaluation of embeddings, dense and sparse: similarities compared with scores."""

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
    return SimilarityEvaluation(*_load_pairs(path, model, sampling), model)


def load_sparse_similarity(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> Evaluation:
    """Load two items per pair. Raises BadEvaluationData for an unusable file."""
    return SparseSimilarityEvaluation(*_load_pairs(path, model, sampling), model)


def _load_pairs(
    path: Path, model: EvaluatedModel, sampling: ExampleSampling
) -> tuple[list[TokenizedItem], list[float]]:
    pairs = sampling.sample(read_pairs(path))
    scores = [pair.score for pair in pairs]
    if len(set(scores)) < 2:
        raise FileLocation(path, EXPECTED).data_error("all scores are equal, so they have no order")
    texts = [model.prompt + text for pair in pairs for text in (pair.left, pair.right)]
    return tokenize_texts(model, texts), scores


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


class SparseSimilarityEvaluation(SimilarityEvaluation):
    """SimilarityEvaluation of sparse vectors, which are compared by dot product.

    It keeps only the weights above 0 of a vector, [2, N] with their token ids in the first row.
    """

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        pairs = zip(reduced[0::2], reduced[1::2], strict=True)
        similarities = [_multiply_sparse(left, right) for left, right in pairs]
        return {"spearman": spearman(similarities, self._scores)}

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        ids = np.flatnonzero(output)
        return np.stack([ids.astype(np.float32), output[ids]])  # ids below 2**24 stay exact


def _multiply_sparse(left: ReducedOutput, right: ReducedOutput) -> float:
    _, a, b = np.intersect1d(left[0], right[0], assume_unique=True, return_indices=True)
    return float(left[1][a] @ right[1][b])
