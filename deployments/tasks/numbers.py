"""Rows of numbers to scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def softmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Softmax over the last axis, shifted so that it cannot overflow."""
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def sigmoid(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Element-wise logistic function, through tanh so that it cannot overflow."""
    shares: NDArray[np.float32] = np.float32(0.5) * (1 + np.tanh(rows / 2))
    return shares


def identity(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows themselves."""
    return rows


def normalize(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows scaled to length 1; a row of zeros stays zero."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    units: NDArray[np.float32] = rows / np.maximum(norms, 1e-12)
    return units
