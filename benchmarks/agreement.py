"""How near timed answers are to the right ones. Asked after the clock has stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.errors import BenchmarkError

# A manifest states the worst cosine over the build's probe texts; other texts may be a bit worse.
COSINE_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class Agreement:
    """The worst cosine over everything that was compared, and the least it may be."""

    what: str
    compared: int
    worst_cosine: float
    required_cosine: float

    @classmethod
    def of(cls, what: str, left: ArrayLike, right: ArrayLike, required: float) -> Agreement:
        """Row by row, both [N, W]."""
        cosines = row_cosines(left, right)
        return cls(what, len(cosines), float(cosines.min()) if len(cosines) else 0.0, required)

    @property
    def holds(self) -> bool:
        """Whether something was compared, and all of it is near enough."""
        return self.compared > 0 and self.worst_cosine >= self.required_cosine

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.what}: worst cosine {self.worst_cosine:.4f} of {self.compared}, "
            f"required {self.required_cosine:.4f}"
        )


def row_cosines(left: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Cosine of every row of `left` with the same row of `right`, both [N, W]; the answer is [N].

    A row of zeros has cosine 0 with everything.
    """
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: NDArray[np.float64] = np.einsum("nw,nw->n", a, b) / np.maximum(lengths, 1e-12)
    return cosines


def require(agreements: Iterable[Agreement]) -> None:
    """Raises BenchmarkError when one of them does not hold: the figures are then worth nothing."""
    for agreement in agreements:
        if not agreement.holds:
            raise BenchmarkError(
                f"wrong answers, so the figures mean nothing: {agreement.sentence}",
                hint="check that the store holds what is served, or build the model again",
            )
