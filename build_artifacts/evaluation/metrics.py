"""Metrics of predictions: correlation, accuracy, F1 and ranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def spearman(left: ArrayLike, right: ArrayLike) -> float:
    """Return the rank correlation, -1 to 1; equal values share the mean of their ranks."""
    return pearson(compute_ranks(left), compute_ranks(right))


def pearson(left: ArrayLike, right: ArrayLike) -> float:
    """Return the linear correlation, -1 to 1; 0 if either side is constant."""
    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    # The rounded mean of equal values may differ from these values. Two constant sides would then
    # correlate.
    if np.all(x == x[0]) or np.all(y == y[0]):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def compute_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Return the rank of each value from 1; equal values share the mean of their ranks."""
    _, group, sizes = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    shared: NDArray[np.float64] = np.cumsum(sizes) - (sizes - 1) / 2
    return shared[group]


def multiply_rows(left: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return the dot products [N] of corresponding rows of `left` and `right`, both [N, W]."""
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    products: NDArray[np.float64] = np.einsum("nw,nw->n", a, b)
    return products


def row_cosines(left: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return the cosines [N] of corresponding rows of `left` and `right`, both [N, W].

    The cosine of a zero row is 0.
    """
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: NDArray[np.float64] = multiply_rows(a, b) / np.maximum(lengths, 1e-12)
    return cosines


def accuracy(predicted: ArrayLike, expected: ArrayLike) -> float:
    """Return the share of equal entries."""
    return float((np.asarray(predicted) == np.asarray(expected)).mean())


def f1(hits: int, predicted: int, expected: int) -> float:
    """Return the harmonic mean of precision and recall; 0 if nothing is predicted or expected."""
    return 2 * hits / (predicted + expected) if predicted + expected else 0.0


def micro_f1(predicted: NDArray[np.bool_], expected: NDArray[np.bool_]) -> float:
    """Return one F1 over the decisions of all labels; both arrays are [N, labels]."""
    return f1(int((predicted & expected).sum()), int(predicted.sum()), int(expected.sum()))


def macro_f1(predicted: NDArray[np.bool_], expected: NDArray[np.bool_]) -> float:
    """Return the mean F1 of the labels that occur in either array; both are [N, labels]."""
    occurs = (predicted | expected).any(axis=0)
    scores = [
        micro_f1(predicted[:, [label]], expected[:, [label]]) for label in np.flatnonzero(occurs)
    ]
    return float(np.mean(scores)) if scores else 0.0


def rank_documents(scores: Sequence[float], relevant: frozenset[int]) -> list[bool]:
    """Return the relevance of each document, ordered by descending score.

    Relevant documents come last among equal scores. A model with constant scores must not profit
    from the order of the documents in the file.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in relevant))
    return [i in relevant for i in order]


def reciprocal_rank(ranking: Sequence[bool]) -> float:
    """Return 1 / rank of the first relevant document, or 0 if none is relevant."""
    return 1 / (ranking.index(True) + 1) if True in ranking else 0.0


def ndcg(ranking: Sequence[bool], depth: int) -> float:
    """Return the nDCG of the first `depth` ranks with binary relevance; 0 if none is relevant."""
    discounts = 1 / np.log2(np.arange(2, min(depth, len(ranking)) + 2))
    best = discounts[: sum(ranking)].sum()
    return float(discounts[np.asarray(ranking[:depth])].sum() / best) if best else 0.0
