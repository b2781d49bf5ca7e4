"""Predicted time of queued items, corrected by the measured times of each model's passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from deployments.load import WorkRate
from deployments.messages import ModelRef

# Returns the estimated seconds that one engine thread spends per item of a full pass. Arguments:
# the model, and the number of tokens, which is equal for all items of the pass.
EstimateItem = Callable[[ModelRef, int], float]
# Estimate for a model without a cost table, in seconds per token: the value of a small encoder on a
# CPU.
GUESS_S_PER_TOKEN = 5e-5
# The initial estimate weighs as much as measured passes whose prices add up to this time.
ESTIMATE_WEIGHT_S = 0.05
# After this many passes of a model, measurements under the present load outweigh all earlier ones
# in its predictions (see RATE_DECAY).
MEASURED_PASSES = 20
# Lower limit of predictions. The costs in a FairQueue must be above 0, and the scheduler divides by
# predictions.
MIN_PREDICTION_S = 1e-9


def guess_item_s(_model: ModelRef, tokens: int) -> float:
    return tokens * GUESS_S_PER_TOKEN


class WorkPrices:
    """Predictor of the time that a replica with `concurrent_passes` threads needs for items.

    The price of an item is its time on one thread, from a cost table or guessed. A prediction
    multiplies the price by a measured rate: seconds of the replica, with all of its threads, per
    unit of price.
    """

    def __init__(self, concurrent_passes: int, estimate: EstimateItem) -> None:
        self.price = estimate
        self._concurrent_passes = concurrent_passes
        self.passes: defaultdict[ModelRef, int] = defaultdict(int)  # passes recorded so far
        self._rates: defaultdict[ModelRef, WorkRate] = defaultdict(self._estimated_rate)

    def forget(self, model: ModelRef) -> None:
        """Drop the measurements of a model, so that the estimate applies again."""
        self.passes.pop(model, None)
        self._rates.pop(model, None)

    def predict_s(self, model: ModelRef, price: float) -> float:
        """Return the seconds that the replica needs for work of this price and no other work.

        The result is above 0.
        """
        return max(self._rates[model].predict_s(price), MIN_PREDICTION_S)

    def record(self, model: ModelRef, price: float, thread_s: float) -> None:
        """Record a pass of `price` that took `thread_s` seconds of engine threads."""
        self.passes[model] += 1
        self._rates[model].record(price, thread_s / self._concurrent_passes)

    def _estimated_rate(self) -> WorkRate:
        rate = WorkRate()
        rate.record(ESTIMATE_WEIGHT_S, ESTIMATE_WEIGHT_S / self._concurrent_passes)
        return rate
