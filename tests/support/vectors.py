"""When two embeddings count as the same."""

from __future__ import annotations

from typing import Any

import numpy as np

# Replies of one model may differ by the company a text is computed in (dynamic int8 ranges).
SAME_COSINE = 0.98


def cosine(a: Any, b: Any) -> float:
    """The cosine of two vectors, of any length."""
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def is_same_embedding(a: Any, b: Any) -> bool:
    """Whether two vectors are of one text."""
    return np.shape(a) == np.shape(b) and cosine(a, b) > SAME_COSINE
