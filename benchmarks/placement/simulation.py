"""Simulation of a day of requests on a pool of CPU replicas and a pool of GPU replicas.

Each pool is a deployment with its own queue and autoscaling. The requests of a second are placed in
pieces, so that the placement of a piece sees the queues after the previous piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.controller import Controller
from benchmarks.autoscaling.day import Day
from benchmarks.autoscaling.policies import count_requests, parse_autoscaling
from benchmarks.autoscaling.simulation import PASS_S, ServerSettings, Simulation
from deployments.artifacts.types import Device
from deployments.ingress.devices.placement import DeviceForecast, choose_forecast

PIECE_S = 0.25  # approximate work of a piece, in s of a CPU replica; a request is never split

# Chooses the device for a request, given a forecast per device and the seconds until the deadline
# of the request.
Place = Callable[[Sequence[DeviceForecast], float], Device]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Properties of hardware and requests. The speedups are assumed, not measured."""

    gpu_speedups: tuple[float, ...] = (4.0, 12.0, 30.0)  # speedup over a CPU replica, one per model
    gpu_price: float = 10.0  # price of a GPU replica relative to a CPU replica
    cpu_replicas: int = 8  # maximum number of replicas
    gpu_replicas: int = 2
    cpu_start_s: int = 10
    gpu_start_s: int = 20
    interactive_share: float = 0.8
    interactive_deadline_s: float = 1.0
    batch_deadline_s: float = 30.0


class Policy(NamedTuple):
    """A way to place requests. `min_replicas` maps a device without a pool to None."""

    name: str
    place: Place
    min_replicas: Mapping[Device, int | None]


POLICIES = (
    Policy("always CPU", lambda *_: Device.CPU, {Device.CPU: 1, Device.GPU: None}),
    Policy("always GPU", lambda *_: Device.GPU, {Device.CPU: None, Device.GPU: 1}),
    Policy("auto", lambda *seen: choose_forecast(*seen).device, {Device.CPU: 1, Device.GPU: 0}),
    Policy(
        "auto, one GPU kept",
        lambda *seen: choose_forecast(*seen).device,
        {Device.CPU: 1, Device.GPU: 1},
    ),
)


@dataclass(frozen=True, slots=True)
class ReplayedDay:
    """Results of one simulated day: numbers of requests, and replica hours."""

    requests: float
    in_time: float
    interactive: float
    interactive_in_time: float
    rejected: float
    by_device: Mapping[str, float]  # number of requests placed on each device
    replica_hours: Mapping[str, float]  # hours of running and starting replicas


def split_by_deadline(day: Day, settings: FleetSettings, seed: int) -> Day:
    """Split each model into two models, one with interactive and one with batch requests.

    The rows of interactive requests come first, then the rows of batch requests.
    """
    random = np.random.default_rng(seed)
    interactive = random.binomial(day.requests, settings.interactive_share)
    return Day(np.tile(day.request_s, 2), np.vstack([interactive, day.requests - interactive]))


class PlacedDay:
    """Simulation of a day under one policy. The day comes from `split_by_deadline`."""

    def __init__(
        self,
        day: Day,
        settings: FleetSettings,
        policy: Policy,
        autoscaling: Mapping[Device, Mapping[str, Any]],
    ) -> None:
        """Prepare the pools. `autoscaling` holds the settings of each pool.

        `settings` and `policy` replace the replica bounds in `autoscaling`.
        """
        models = len(day.request_s) // 2
        self._day, self._settings, self._policy = day, settings, policy
        self._deadlines_s = np.repeat(
            [settings.interactive_deadline_s, settings.batch_deadline_s], models
        )
        speedups = np.tile(settings.gpu_speedups, 2)  # interactive requests, then batch requests
        self._request_s = {Device.CPU: day.request_s, Device.GPU: day.request_s / speedups}
        self._prices = {Device.CPU: 1.0, Device.GPU: settings.gpu_price}
        self._pools = {
            device: self._build_pool(device, autoscaling[device], minimum)
            for device, minimum in policy.min_replicas.items()
            if minimum is not None
        }

    def run(self) -> ReplayedDay:
        placed = dict.fromkeys(self._pools, 0.0)
        for second in range(self._day.requests.shape[1]):
            parts = self._place(second, self._day.requests[:, second])
            for device, pool in self._pools.items():
                placed[device] += float(parts[device].sum())
                pool.step(second, parts[device])
        return self._summarize(placed)

    def _place(
        self, second: int, arriving: NDArray[np.int64]
    ) -> Mapping[Device, NDArray[np.float64]]:
        """Divide the requests of one second among the pools."""
        parts = {device: np.zeros(len(arriving)) for device in self._pools}
        queued_s = {device: pool.queued_s for device, pool in self._pools.items()}
        running = {device: pool.count_running(second) for device, pool in self._pools.items()}
        starts_s = {device: pool.start_s(second) for device, pool in self._pools.items()}
        for column in np.flatnonzero(arriving):
            count = int(arriving[column])
            pieces = min(math.ceil(count * self._day.request_s[column] / PIECE_S), count)
            for piece in range(pieces):
                number = count // pieces + (piece < count % pieces)
                forecasts = [
                    self._forecast(
                        device, queued_s[device], running[device], starts_s[device], column
                    )
                    for device in self._pools
                ]
                device = self._policy.place(forecasts, self._deadlines_s[column])
                parts[device][column] += number
                queued_s[device] += number * self._request_s[device][column]
        return parts

    def _forecast(
        self, device: Device, queued_s: float, running: int, start_s: float, column: np.intp
    ) -> DeviceForecast:
        work_s = float(self._request_s[device][column])
        return DeviceForecast(
            device=device,
            queue_s=queued_s / max(running, 1),
            load_s=start_s,
            run_s=PASS_S + work_s,
            work_s=work_s,
            price=self._prices[device],
        )

    def _build_pool(
        self, device: Device, autoscaling: Mapping[str, Any], minimum: int
    ) -> Simulation:
        settings, is_gpu = self._settings, device is Device.GPU
        bounds = {
            "min_replicas": minimum,
            "max_replicas": settings.gpu_replicas if is_gpu else settings.cpu_replicas,
            "initial_replicas": minimum,
        }
        controller = Controller(parse_autoscaling({**autoscaling, **bounds}))
        start_s = settings.gpu_start_s if is_gpu else settings.cpu_start_s
        server = ServerSettings(start_s, deadline_s=settings.batch_deadline_s)
        day = Day(self._request_s[device], self._day.requests)
        return Simulation(day, server, controller, count_requests, minimum)

    def _summarize(self, placed: Mapping[Device, float]) -> ReplayedDay:
        in_time = np.zeros(len(self._deadlines_s))
        for pool in self._pools.values():
            for (_, latency_s, _), part in zip(
                pool.trace.latencies, pool.trace.served, strict=True
            ):
                in_time += part * (latency_s <= self._deadlines_s)
        interactive = len(in_time) // 2
        return ReplayedDay(
            requests=float(self._day.requests.sum()),
            in_time=float(in_time.sum()),
            interactive=float(self._day.requests[:interactive].sum()),
            interactive_in_time=float(in_time[:interactive].sum()),
            rejected=sum(sum(pool.trace.rejected) for pool in self._pools.values()),
            by_device={device.value: number for device, number in placed.items()},
            replica_hours={
                device.value: sum(pool.trace.paid) / 3600 for device, pool in self._pools.items()
            },
        )
