"""A day of requests with bursts, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Seconds that a replica needs for one request. The simulated models take these values in turn. They
# range from short texts on a small model to documents on a large model.
REQUEST_S = (0.002, 0.005, 0.02)
NIGHT_SHARE = 0.15  # load at night relative to the load at noon
MEDIAN_BURST_S = 300.0
MAX_ONSET_S = 30.0  # maximum s until a burst reaches its full height
BURST_SPREAD = 0.8  # standard deviation of the natural logarithm of the burst length


@dataclass(frozen=True, slots=True)
class DaySettings:
    """Load of a simulated day. Work of 1.0 keeps one replica busy all the time."""

    seconds: int = 86_400
    models: int = 3
    base_work: float = 1.2  # work at noon, summed over all models
    bursts: int = 8  # number of bursts per model in the whole day
    burst_work: float = 6.0  # upper limit of the work of one burst


class Day(NamedTuple):
    """Simulated demand of one day: the requests of every model in every second."""

    request_s: NDArray[np.float64]  # shape [models]; seconds that one replica needs per request
    requests: NDArray[np.int64]  # number of requests; shape [models, seconds]

    @property
    def work(self) -> NDArray[np.float64]:
        """Number of replicas that the arriving work of each second keeps busy; shape [seconds]."""
        return self.request_s @ self.requests


def draw_day(settings: DaySettings, seed: int) -> Day:
    """Draw Poisson arrivals from a daily wave of load and bursts of single models."""
    random = np.random.default_rng(seed)
    seconds = np.arange(settings.seconds)
    wave = NIGHT_SHARE + (1 - NIGHT_SHARE) * np.sin(np.pi * seconds / settings.seconds) ** 2
    work = np.tile(settings.base_work / settings.models * wave, (settings.models, 1))
    for model in range(settings.models):
        for _ in range(settings.bursts):
            work[model] += _draw_burst(random, settings, seconds)
    request_s = np.resize(np.array(REQUEST_S), settings.models)
    return Day(request_s, random.poisson(work / request_s[:, np.newaxis]))


def _draw_burst(
    random: np.random.Generator, settings: DaySettings, seconds: NDArray[np.int64]
) -> NDArray[np.float64]:
    start_s = random.uniform(0, settings.seconds)
    length_s = random.lognormal(np.log(MEDIAN_BURST_S), BURST_SPREAD)
    onset_s = random.uniform(1, MAX_ONSET_S)
    height = random.uniform(0.25, 1.0) * settings.burst_work
    rise = np.clip((seconds - start_s) / onset_s, 0, 1)
    fall = np.clip((start_s + length_s - seconds) / onset_s, 0, 1)
    return np.asarray(height * np.minimum(rise, fall))
