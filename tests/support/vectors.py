"""Comparison of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

# Minimum cosine of two embeddings of the same text. They differ slightly if computed in different
# batches, because each batch has its own int8 scales.
SAME_COSINE = 0.98


def cosine(a: Any, b: Any) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def is_same_embedding(a: Any, b: Any) -> bool:
    """Return whether two vectors belong to the same text."""
    return np.shape(a) == np.shape(b) and cosine(a, b) > SAME_COSINE
