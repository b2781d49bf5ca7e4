"""The arithmetic of the metrics, on plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def spearman(left: ArrayLike, right: ArrayLike) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""
    return pearson(compute_ranks(left), compute_ranks(right))


def pearson(left: ArrayLike, right: ArrayLike) -> float:
    """Linear correlation, -1 to 1; 0 where either side is constant and there is none."""
    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    # The mean of equal numbers may differ from them by rounding, which would look like a slope.
    if np.all(x == x[0]) or np.all(y == y[0]):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def compute_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Rank of each value from 1; equal values share the mean of their ranks."""
    _, group, sizes = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    shared: NDArray[np.float64] = np.cumsum(sizes) - (sizes - 1) / 2
    return shared[group]


def row_cosines(left: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Cosine of every row of `left` with the same row of `right`, both [N, W]; the answer is [N].

    A row of zeros has cosine 0 with everything.
    """
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: NDArray[np.float64] = np.einsum("nw,nw->n", a, b) / np.maximum(lengths, 1e-12)
    return cosines


def accuracy(best: ArrayLike, right: ArrayLike) -> float:
    """Share of equal entries."""
    return float((np.asarray(best) == np.asarray(right)).mean())


def f1(hits: int, predicted: int, expected: int) -> float:
    """Harmonic mean of precision and recall; 0 where nothing was answered and nothing wanted."""
    return 2 * hits / (predicted + expected) if predicted + expected else 0.0


def micro_f1(predicted: NDArray[np.bool_], expected: NDArray[np.bool_]) -> float:
    """F1 over all decisions together, both [N, labels]."""
    return f1(int((predicted & expected).sum()), int(predicted.sum()), int(expected.sum()))


def macro_f1(predicted: NDArray[np.bool_], expected: NDArray[np.bool_]) -> float:
    """Mean F1 of the labels, both [N, labels]; labels that nobody gave are left out."""
    given = (predicted | expected).any(axis=0)
    each = [
        micro_f1(predicted[:, [label]], expected[:, [label]]) for label in np.flatnonzero(given)
    ]
    return float(np.mean(each)) if each else 0.0


def rank_documents(scores: Sequence[float], relevant: frozenset[int]) -> list[bool]:
    """Whether the document at each place is relevant, highest score first.

    Of equal scores the relevant come last: a model that cannot tell documents apart must not
    profit from the order in which a file lists them.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in relevant))
    return [i in relevant for i in order]


def reciprocal_rank(places: Sequence[bool]) -> float:
    """1 / place of the first relevant document, 0 without one."""
    return 1 / (places.index(True) + 1) if True in places else 0.0


def ndcg(places: Sequence[bool], depth: int) -> float:
    """Discounted gain of the first `depth` places, as a share of the best order's; 0 or 1 each."""
    discounts = 1 / np.log2(np.arange(2, min(depth, len(places)) + 2))
    best = discounts[: sum(places)].sum()
    return float(discounts[np.asarray(places[:depth])].sum() / best) if best else 0.0
