"""Predicted time of queued items, corrected by what the passes of each model really take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from deployments.load import WorkRate
from deployments.messages import ModelRef

# s of one engine thread for an item of so many tokens, in a pass with others of its length.
EstimateItem = Callable[[ModelRef, int], float]
# s per token before the first passes of a model without a cost table: a small encoder on a CPU.
GUESS_S_PER_TOKEN = 5e-5
# s of predicted work that the estimate outweighs as long as measurements are fewer.
ESTIMATE_WEIGHT_S = 0.05
# Passes of a model after which its predictions rest on measurements of the present load.
MEASURED_PASSES = 20


def guess_item_s(_model: ModelRef, tokens: int) -> float:
    return tokens * GUESS_S_PER_TOKEN


class WorkPrices:
    """Prices of the models of one replica, which runs `concurrent_passes` at a time.

    A price is the estimate of a cost table, or a guess. A prediction is a price at the measured
    rate of the replica, all threads together.
    """

    def __init__(self, concurrent_passes: int, estimate: EstimateItem) -> None:
        self.price = estimate
        self._concurrent_passes = concurrent_passes
        self.passes: defaultdict[ModelRef, int] = defaultdict(int)  # so far
        self._rates: defaultdict[ModelRef, WorkRate] = defaultdict(self._estimated_rate)

    def forget(self, model: ModelRef) -> None:
        """Forget what was measured of a model."""
        self.passes.pop(model, None)
        self._rates.pop(model, None)

    def predict_s(self, model: ModelRef, price: float) -> float:
        """Return the seconds that the replica needs for work of this price, if it does no other."""
        return self._rates[model].predict_s(price)

    def record(self, model: ModelRef, price: float, forward_s: float) -> None:
        """Record a pass."""
        self.passes[model] += 1
        self._rates[model].record(price, forward_s / self._concurrent_passes)

    def _estimated_rate(self) -> WorkRate:
        rate = WorkRate()
        rate.record(ESTIMATE_WEIGHT_S, ESTIMATE_WEIGHT_S / self._concurrent_passes)
        return rate
