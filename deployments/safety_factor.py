"""Factor by which admission multiplies predicted times, learned from jobs that ended."""

from __future__ import annotations

from typing import NamedTuple

from deployments.deadlines import remaining_s
from deployments.messages import PRIORITIES

# The factor adapts until this share of the jobs ends within factor * predicted time.
TARGET_SHARE = 0.95
# A job is late if it takes longer than factor * predicted time. A late job increases the factor by
# LATE_STEP * TARGET_SHARE of its value. Any other job decreases the factor by a nineteenth of that,
# LATE_STEP * (1 - TARGET_SHARE). The factor therefore settles where TARGET_SHARE of the jobs are in
# time.
LATE_STEP = 0.04
MIN_FACTOR, MAX_FACTOR = 1.2, 1.6
# The predictions of lower priorities ignore jobs of the highest priority that arrive later, so they
# may be much too short. At a factor above 1 / MIN_TIME_SHARE no accepted job would be informative,
# and the factor would never decrease again.
MAX_LOWER_FACTOR = 3.0
# Predictions below this share of the time until the deadline are ignored, because such short jobs
# do not show an overload. Jobs that arrive after their deadline are ignored too.
MIN_TIME_SHARE = 0.25


class Prediction(NamedTuple):
    """The duration of a job, predicted when the job was queued."""

    seconds: float
    left_s: float  # time between queuing and the deadline
    deadline_s: float  # on this process's monotonic clock
    priority: int = 0  # index in PRIORITIES

    @property
    def is_informative(self) -> bool:
        return self.left_s > 0 and self.seconds >= MIN_TIME_SHARE * self.left_s


class SafetyFactor:
    """A quantile of the ratio of actual to predicted times, estimated by stochastic approximation.

    Robbins and Monro (1951), https://doi.org/10.1214/aoms/1177729586. A factor is needed because
    predictions are too short while other processes use cores that were free at the measurement.
    """

    def __init__(self, max_value: float = MAX_FACTOR) -> None:
        self.value = MIN_FACTOR
        self._max_value = max_value

    def record_end(self, prediction: Prediction) -> None:
        """Learn from a job that ends now, or that is dropped now because it is late."""
        if prediction.is_informative:
            self._step(TARGET_SHARE if self._is_late(prediction) else TARGET_SHARE - 1)

    def record_abandoned(self, prediction: Prediction) -> None:
        """Learn from a job that ends now without an answer, if it is late already."""
        if prediction.is_informative and self._is_late(prediction):
            self._step(TARGET_SHARE)

    def _is_late(self, prediction: Prediction) -> bool:
        elapsed_s = prediction.left_s - remaining_s(prediction.deadline_s)
        return elapsed_s > self.value * prediction.seconds

    def _step(self, step: float) -> None:
        value = self.value * (1 + LATE_STEP * step)
        self.value = min(max(value, MIN_FACTOR), self._max_value)


def build_safety_factors() -> tuple[SafetyFactor, ...]:
    """Return a factor per priority, so that late jobs of one do not tighten admission of others."""
    return SafetyFactor(), *(SafetyFactor(MAX_LOWER_FACTOR) for _ in PRIORITIES[1:])
