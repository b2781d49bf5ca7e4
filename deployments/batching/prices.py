"""Predicted time of queued items, corrected by the measured times of each model's passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from deployments.load import WorkRate
from deployments.messages import ModelRef

# Estimates the seconds of one engine thread for an item of this many tokens, in a full pass of such
# items.
EstimateItem = Callable[[ModelRef, int], float]
# Seconds per token before the first passes of a model without a cost table. The value is that of a
# small encoder on a CPU.
GUESS_S_PER_TOKEN = 5e-5
# The estimate counts as much as measurements of this many seconds of predicted work.
ESTIMATE_WEIGHT_S = 0.05
# After this many passes of a model, its predictions rest on measurements under the present load.
MEASURED_PASSES = 20


def guess_item_s(_model: ModelRef, tokens: int) -> float:
    return tokens * GUESS_S_PER_TOKEN


class WorkPrices:
    """Prices of the models of one replica, which runs `concurrent_passes` at a time.

    A price is the estimate from a cost table, or a guess. A prediction multiplies a price by the
    measured rate: seconds of the replica, with all of its threads, per unit of price.
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
        """Return the seconds that the replica needs for work of this price and no other work."""
        return self._rates[model].predict_s(price)

    def record(self, model: ModelRef, price: float, forward_s: float) -> None:
        """Record a pass."""
        self.passes[model] += 1
        self._rates[model].record(price, forward_s / self._concurrent_passes)

    def _estimated_rate(self) -> WorkRate:
        rate = WorkRate()
        rate.record(ESTIMATE_WEIGHT_S, ESTIMATE_WEIGHT_S / self._concurrent_passes)
        return rate
