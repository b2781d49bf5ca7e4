"""Choice of the device for requests with `auto`, which lets the server choose. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployments.artifacts.types import Device


class DeviceForecast(NamedTuple):
    """Forecast for one request on the replicas of one kind of device."""

    device: Device
    queue_s: float  # seconds until the work ahead of the request is done
    load_s: float  # seconds until a running replica has the model; 0 if the model is loaded
    run_s: float  # seconds from the end of `queue_s` and `load_s` to the answer
    work_s: float  # seconds of a replica's time that the request uses
    price: float  # relative price of one second of a replica (`placement.prices`)

    @property
    def completion_s(self) -> float:
        return self.queue_s + self.load_s + self.run_s

    @property
    def cost(self) -> float:
        """The price of the replica time for the request, loading the model included."""
        return self.price * (self.work_s + self.load_s)


def choose_forecast(forecasts: Sequence[DeviceForecast], deadline_s: float) -> DeviceForecast:
    """Return the cheapest forecast that ends within `deadline_s` from now, else the fastest.

    Of equal forecasts, the first is returned. `forecasts` must not be empty.
    """
    in_time = [one for one in forecasts if one.completion_s <= deadline_s]
    if in_time:
        return min(in_time, key=lambda one: (one.cost, one.completion_s))
    return min(forecasts, key=lambda one: (one.completion_s, one.cost))


def choose_other_forecast(
    forecasts: Sequence[DeviceForecast], refused: Device, deadline_s: float
) -> DeviceForecast | None:
    """Choose another device for a request that the full replicas of `refused` rejected.

    Returns None if no other device answers within `deadline_s`. The client should then retry later.
    """
    others = [one for one in forecasts if one.device != refused and one.completion_s <= deadline_s]
    return choose_forecast(others, deadline_s) if others else None
