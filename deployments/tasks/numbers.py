"""Functions that convert rows of logits or vectors to scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def softmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply softmax over the last axis. Subtract the maximum to avoid overflow."""
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply the logistic function to each element, with full precision near 0 too.

    Powers of negative numbers do not overflow.
    """
    powers = np.exp(-np.abs(rows))
    probabilities: NDArray[np.float32] = np.where(rows >= 0, 1, powers) / (1 + powers)
    return probabilities


def identity(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows


def normalize(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each row to Euclidean length 1. A row of zeros stays zero."""
    norms = np.sqrt(np.vecdot(rows, rows))[:, np.newaxis]
    units: NDArray[np.float32] = rows / np.maximum(norms, 1e-12)
    return units
