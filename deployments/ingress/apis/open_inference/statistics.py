"""Statistics of each model for the Open Inference Protocol."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from deployments.messages import ModelRef
from deployments.records import RequestRecord
from deployments.tasks import list_task_names

# Tasks that count as inferences; `tokenize` and `decode` do not. "none" is the task of a request
# that failed before its task was known.
INFERENCES = frozenset({"none", *list_task_names()})


class Durations(TypedDict):
    """Number of events and their total duration in nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(TypedDict):
    """Requests by outcome, and phases of the successful requests without a cache hit."""

    success: Durations  # including cache hits
    fail: Durations
    queue: Durations
    compute_input: Durations  # tokenization
    compute_infer: Durations  # the forward pass
    compute_output: Durations  # always 0: not measured
    cache_hit: Durations


class ModelStats(TypedDict):
    """Statistics of one version of a model since the start of this process."""

    name: str
    version: str
    last_inference: int  # milliseconds since the epoch, failures included; 0: never
    inference_count: int  # items of successful requests
    execution_count: int  # successful requests without a cache hit; /metrics counts forward passes
    inference_stats: InferenceStatistics
    batch_stats: list[Durations]  # always empty: encoders build the batches, not the ingress


class StatisticsResponse(TypedDict):
    """Response of the `stats` routes of this protocol."""

    model_stats: list[ModelStats]


@dataclass(slots=True)
class _Sum:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)

    def to_durations(self) -> Durations:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class _ModelCounts:
    last_ms: int = 0
    items: int = 0
    success: _Sum = field(default_factory=_Sum)
    fail: _Sum = field(default_factory=_Sum)
    queue: _Sum = field(default_factory=_Sum)
    tokenize: _Sum = field(default_factory=_Sum)
    forward: _Sum = field(default_factory=_Sum)
    cache_hit: _Sum = field(default_factory=_Sum)


class ModelStatistics:
    """RequestRecorder that counts this ingress replica's requests of all APIs, by model version.

    `clock` returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._counts: defaultdict[ModelRef, _ModelCounts] = defaultdict(_ModelCounts)

    def record(self, request: RequestRecord) -> None:
        if request.task not in INFERENCES:
            return
        counts = self._counts[ModelRef(request.model, request.version)]
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
        counts.tokenize.add(request.timings.tokenize_s)
        counts.forward.add(request.timings.forward_s)

    def build_stats(self, model: ModelRef) -> ModelStats:
        counts = self._counts.get(model, _ModelCounts())
        return {
            "name": model.id,
            "version": model.version,
            "last_inference": counts.last_ms,
            "inference_count": counts.items,
            "execution_count": counts.forward.count,
            "inference_stats": {
                "success": counts.success.to_durations(),
                "fail": counts.fail.to_durations(),
                "queue": counts.queue.to_durations(),
                "compute_input": counts.tokenize.to_durations(),
                "compute_infer": counts.forward.to_durations(),
                "compute_output": _Sum().to_durations(),
                "cache_hit": counts.cache_hit.to_durations(),
            },
            "batch_stats": [],
        }
