"""Predicted ends of encoder calls: a call that would probably end too late is refused at once."""

from __future__ import annotations

import asyncio

from deployments.batching.calls import CallOutputs, QueuedItem
from deployments.deadlines import remaining_s
from deployments.errors import build_overloaded
from deployments.fair_queue import FairQueue
from deployments.messages import Sender
from deployments.safety_factor import Prediction, build_safety_factors


class DeadlineAdmission:
    """Admission of new calls by their predicted ends. It learns from the errors of predictions."""

    def __init__(self, queue: FairQueue[QueuedItem]) -> None:
        """Predict from `queue`, whose costs are predicted seconds of the replica."""
        self._queue = queue
        self._safety_factors = build_safety_factors()

    def predict(
        self, cost: float, deadline_s: float, sender: Sender, running_s: float
    ) -> Prediction:
        """Predict the end of a call. Raises Overloaded if the call would probably end too late.

        `cost` and `running_s` are the predicted seconds of the call and of the running passes. A
        call is refused if the predicted time, multiplied by the safety factor, exceeds the time
        until the deadline. An empty queue accepts every call, because a retry would not start
        sooner. Expired calls are accepted too, and so are calls that would be short even behind the
        whole queue (see MIN_TIME_SHARE).
        """
        left_s, queue = remaining_s(deadline_s), self._queue
        client, priority = sender
        if not queue or left_s < 0:  # an expired call is dropped when its turn comes
            return Prediction(0.0, left_s, deadline_s, priority)
        prediction = Prediction(running_s + queue.cost + cost, left_s, deadline_s, priority)
        if not prediction.is_informative:  # too short, even behind the whole queue
            return prediction
        ahead_s = queue.cost_ahead(cost=cost, client=client, priority=priority)
        prediction = prediction._replace(seconds=running_s + ahead_s + cost)
        needed_s = self._safety_factors[priority].value * prediction.seconds
        if needed_s > left_s:
            raise build_overloaded(
                f"The request would take about {needed_s:.1f} s, its deadline is in {left_s:.1f} "
                f"s: {len(queue)} texts wait. Retry later.",
                needed_s - left_s,
                needed_s,
            )
        return prediction

    def record_end(self, prediction: Prediction, done: asyncio.Future[CallOutputs]) -> None:
        """Learn from a call that ended.

        A call that failed or was cancelled counts only if it is late. The ingress cancels a call
        at its deadline, so a cancelled call may be a late one.
        """
        factor = self._safety_factors[prediction.priority]
        if done.cancelled() or done.exception() is not None:
            factor.record_abandoned(prediction)
        else:
            factor.record_end(prediction)
