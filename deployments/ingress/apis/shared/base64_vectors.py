"""Vectors as base64, as OpenAI's and Cohere's clients read them."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray


def encode_base64(rows: NDArray[np.float32]) -> list[str]:
    """Encode each row of `rows` [texts, dimensions] as base64 of little-endian float32."""
    return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
