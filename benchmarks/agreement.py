"""How near timed answers are to the right ones. Asked after the clock has stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from numpy.typing import ArrayLike

from benchmarks.errors import BenchmarkError
from build_artifacts.evaluation.metrics import row_cosines

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


def require(agreements: Iterable[Agreement]) -> None:
    """Raises BenchmarkError when one of them does not hold: the figures are then worth nothing."""
    for agreement in agreements:
        if not agreement.holds:
            raise BenchmarkError(
                f"wrong answers, so the figures mean nothing: {agreement.sentence}",
                hint="check that the store holds what is served, or build the model again",
            )
