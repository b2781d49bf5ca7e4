"""Safety factor of predicted times, learned from jobs that ended."""

from __future__ import annotations

from typing import NamedTuple

from deployments.deadlines import remaining_s

# Share of the jobs that end within the predicted time times the factor.
TARGET_SHARE = 0.95
# Logarithmic step of the factor after a late job; one after a job in time is 19 times smaller, so
# that the factor rests where the target share is reached.
LATE_STEP = 0.04
MIN_FACTOR, MAX_FACTOR = 1.2, 1.6
# Predictions below this share of the time left say nothing about overload.
MIN_TIME_SHARE = 0.25


class Prediction(NamedTuple):
    """The predicted end of a job, made when it was queued."""

    seconds: float
    left_s: float  # until the deadline, at that time
    deadline_s: float  # see deployments.deadlines


class SafetyFactor:
    """A quantile of the ratio of actual to predicted times, estimated by stochastic approximation.

    Robbins and Monro (1951), https://doi.org/10.1214/aoms/1177729586. Predictions are too short
    while other processes take cores that the measured steps had.
    """

    def __init__(self) -> None:
        self.value = MIN_FACTOR

    def record_end(self, prediction: Prediction) -> None:
        """Learn from a job that ends now, or that was given up as late."""
        if prediction.seconds < MIN_TIME_SHARE * prediction.left_s:
            return
        elapsed_s = prediction.left_s - remaining_s(prediction.deadline_s)
        is_late = elapsed_s > self.value * prediction.seconds
        step = TARGET_SHARE if is_late else TARGET_SHARE - 1
        value = self.value * (1 + LATE_STEP * step)
        self.value = min(max(value, MIN_FACTOR), MAX_FACTOR)
