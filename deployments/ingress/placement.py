"""The hardware of requests that leave the choice to the server: a pure function of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployments.artifacts.types import Device


class PoolForecast(NamedTuple):
    """Forecast for one request in the replicas of one device."""

    device: Device
    queue_s: float  # until the work before it is done
    load_s: float  # until a replica runs and has the model; 0 if one has
    run_s: float  # then until the answer
    work_s: float  # of one replica, that the request keeps in use
    price: float  # of a second of a replica

    @property
    def completion_s(self) -> float:
        return self.queue_s + self.load_s + self.run_s

    @property
    def cost(self) -> float:
        """The price of the replica, also while it loads the model for this request."""
        return self.price * (self.work_s + self.load_s)


def choose_pool(forecasts: Sequence[PoolForecast], deadline_s: float) -> PoolForecast:
    """Return the cheapest pool that answers within `deadline_s` from now, else the fastest.

    The first of equal ones. `forecasts` is not empty.
    """
    in_time = [one for one in forecasts if one.completion_s <= deadline_s]
    if in_time:
        return min(in_time, key=lambda one: (one.cost, one.completion_s))
    return min(forecasts, key=lambda one: (one.completion_s, one.cost))


def choose_after_refusal(
    forecasts: Sequence[PoolForecast], refused: Device, deadline_s: float
) -> PoolForecast | None:
    """Return the pool for a request that the pool of `refused` had no room for.

    None if no other answers in time: then the client had better retry.
    """
    others = [one for one in forecasts if one.device != refused and one.completion_s <= deadline_s]
    return choose_pool(others, deadline_s) if others else None
