"""What each model has answered so far, as the Open Inference Protocol's clients ask for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from deployments.messages import ModelRef
from deployments.records import RequestRecord
from deployments.tasks import list_task_names

# Requests that only ask the tokenizer are no inferences; "none" failed before its task was known.
INFERENCES = frozenset({"none", *list_task_names()})


class Durations(TypedDict):
    """How often something happened, and how long it took in all, in nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(TypedDict):
    """Requests by how they ended, and where the time of the computed ones went."""

    success: Durations  # those from the cache included
    fail: Durations
    queue: Durations
    compute_input: Durations  # tokenizing
    compute_infer: Durations  # the forward pass
    compute_output: Durations  # decoding: part of the way back, not timed
    cache_hit: Durations


class ModelStats(TypedDict):
    """One model's statistics since this process started."""

    name: str
    version: str
    last_inference: int  # milliseconds since the epoch; 0: never
    inference_count: int  # items of successful requests
    execution_count: int  # requests that were computed; passes are shared and counted in /metrics
    inference_stats: InferenceStatistics
    batch_stats: list[Durations]  # none: batches are made in the encoders


class StatisticsResponse(TypedDict):
    """The answer of every `stats` route."""

    model_stats: list[ModelStats]


@dataclass(slots=True)
class _Sum:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)

    def told(self) -> Durations:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class _Counts:
    last_ms: int = 0
    items: int = 0
    success: _Sum = field(default_factory=_Sum)
    fail: _Sum = field(default_factory=_Sum)
    queue: _Sum = field(default_factory=_Sum)
    encode: _Sum = field(default_factory=_Sum)
    forward: _Sum = field(default_factory=_Sum)
    cache_hit: _Sum = field(default_factory=_Sum)


class ModelStatistics:
    """A RequestRecorder that adds up, per model, the requests of every API of this ingress.

    Other ingress replicas have sums of their own. `clock` gives seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)

    def record(self, request: RequestRecord) -> None:
        """Add one finished request; one that found no model belongs to none."""
        if request.task not in INFERENCES:
            return
        counts = self._counts[request.model]
        counts.last_ms = round(self._clock() * 1e3)
        if request.status != 200:
            counts.fail.add(request.total_s)
            return
        counts.success.add(request.total_s)
        counts.items += request.items
        if request.cache == "hit":
            counts.cache_hit.add(request.total_s)
            return
        counts.queue.add(request.timings.queue_s)
        counts.encode.add(request.timings.tokenize_s)
        counts.forward.add(request.timings.forward_s)

    def of(self, model: ModelRef) -> ModelStats:
        """The sums of one model; one process serves one version of it."""
        counts = self._counts.get(model.id, _Counts())
        return {
            "name": model.id,
            "version": model.version,
            "last_inference": counts.last_ms,
            "inference_count": counts.items,
            "execution_count": counts.forward.count,
            "inference_stats": {
                "success": counts.success.told(),
                "fail": counts.fail.told(),
                "queue": counts.queue.told(),
                "compute_input": counts.encode.told(),
                "compute_infer": counts.forward.told(),
                "compute_output": _Sum().told(),
                "cache_hit": counts.cache_hit.told(),
            },
            "batch_stats": [],
        }
