"""Every metric, with unit, buckets and labels. Made here, recorded from values.

Ray's agents export them on every node with the prefix `ray_`; `GET /metrics` gathers them from
all nodes (ingress/exposition.py), so it does not matter which ingress replica is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.messages import Timings

PREFIX = "hundredfold"
# Seconds, from a fifth of a millisecond to 26 s, each bucket twice the one before.
DURATION_BUCKETS = [0.0002 * 2**n for n in range(18)]
SIZE_BUCKETS = [float(2**n) for n in range(11)]  # items: 1 to 1024

REQUEST_LABELS = ("model", "task", "compute", "status")
STAGE_LABELS = ("model", "task", "compute")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as metrics and the log line see it."""

    model: str
    task: str
    compute: str  # compute type, "cache", or "none" when it failed before the engine
    status: int
    items: int
    total_s: float
    timings: Timings | None


class ServingMetrics:
    """The metrics of one ingress replica."""

    def __init__(self) -> None:
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests answered, by status", tag_keys=REQUEST_LABELS
        )
        self._items = Counter(f"{PREFIX}_items", "Texts answered", tag_keys=STAGE_LABELS)
        self._tokens = Counter(f"{PREFIX}_tokens", "Tokens computed", tag_keys=STAGE_LABELS)
        self._total = self._duration("request", "Whole request inside the ingress")
        self._encode = self._duration("encode", "Tokenization of the list the request was in")
        self._queue = self._duration("queue", "Waiting in the lane for an engine thread")
        self._forward = self._duration("forward", "Forward pass the request was part of")
        self._batch = Histogram(
            f"{PREFIX}_batch_items",
            "Items in the forward pass a request was part of",
            boundaries=SIZE_BUCKETS,
            tag_keys=STAGE_LABELS,
        )
        self._inflight = Gauge(f"{PREFIX}_inflight_items", "Texts being worked on right now")
        self._cache = Gauge(f"{PREFIX}_cache_bytes", "Bytes held by the response cache")

    def record(self, request: RequestRecord) -> None:
        """Publish one finished request."""
        stage = {"model": request.model, "task": request.task, "compute": request.compute}
        self._requests.inc(1, {**stage, "status": str(request.status)})
        self._total.observe(request.total_s, stage)
        if request.timings is None:
            return
        self._items.inc(request.items, stage)
        timings = request.timings
        if timings.tokens:
            self._tokens.inc(timings.tokens, stage)
            self._encode.observe(timings.encode_s, stage)
            self._queue.observe(timings.queue_s, stage)
            self._forward.observe(timings.forward_s, stage)
            self._batch.observe(timings.batch_items, stage)

    def record_load(self, *, inflight_items: int, cache_bytes: int) -> None:
        """Publish how full the replica is."""
        self._inflight.set(inflight_items)
        self._cache.set(cache_bytes)

    def _duration(self, stage: str, description: str) -> Histogram:
        return Histogram(
            f"{PREFIX}_{stage}_seconds",
            description,
            boundaries=DURATION_BUCKETS,
            tag_keys=STAGE_LABELS,
        )
