"""All metrics with unit, buckets and labels, one recorder per kind of replica.

Ray exports a gauge for a limited time after it was set. So idle replicas set their gauges again.

Ray's agent on each node exports the metrics of the node with the prefix `ray_`. `GET /metrics`
scrapes all nodes (ingress/apis/operations), so every ingress replica returns the same metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.load import Load
from deployments.records import ForwardPassRecord, RequestRecord, StepRecord, TokenizeRecord

PREFIX = "hundredfold"
# Seconds, from 0.2 ms to 26 s, each bucket twice the previous one.
DURATION_BUCKETS = [0.0002 * 2**n for n in range(18)]
SIZE_BUCKETS = [float(2**n) for n in range(11)]  # items, 1 to 1024

MAX_MODELS = 100  # limit of the models with their own label, per process
OTHER_MODELS = "other"
REQUEST_LABELS = ("model", "task", "compute", "status")
COUNT_LABELS = (*REQUEST_LABELS, "code")  # `code` would only multiply the buckets of histograms
PASS_LABELS = ("model", "compute")
CACHE_LABELS = ("model", "result")  # the result is `hit` or `miss`
KEY_LABELS = ("key", "compute")


class ModelLabels:
    """Labels of models. Models after the first MAX_MODELS share a label, to limit time series."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._own: set[str] = set()

    def __call__(self, model: str) -> str:
        if model not in self._own:
            if len(self._own) >= self._max_models:
                return OTHER_MODELS
            self._own.add(model)
        return model


class IngressMetrics:
    def __init__(self) -> None:
        self._label = ModelLabels()
        self._requests = _counter(
            "requests", "Requests answered, by status and code of the error", COUNT_LABELS
        )
        self._seconds = _duration("request", "Whole request in the ingress", REQUEST_LABELS)
        self._lookups = _counter(
            "response_cache_lookups", "Look-ups in the response cache", CACHE_LABELS
        )
        self._cache_bytes = Gauge(f"{PREFIX}_response_cache_bytes", "Bytes in the response cache")
        self._last_cache_bytes = 0
        self._replicas = Gauge(
            f"{PREFIX}_running_replicas",
            "Running replicas, as the ingress sees them",
            tag_keys=("deployment",),
        )
        self._key_requests = _counter(
            "key_requests", "Requests of an API key, by status", ("key", "status")
        )
        self._key_tokens = _counter("key_tokens", "Tokens of prompts and answers", KEY_LABELS)
        self._key_seconds = _counter(
            "key_compute_seconds",
            "Seconds of forward passes, by the key's share of their texts, and of generation",
            KEY_LABELS,
        )
        self._lost_spans = _counter(
            "lost_spans", "Spans of traces that the collector did not get", ()
        )

    def record(self, request: RequestRecord) -> None:
        labels = {
            "model": self._label(request.model),
            "task": request.task,
            "compute": request.compute,
            "status": str(request.status),
        }
        self._requests.inc(1, labels | {"code": request.code})
        self._seconds.observe(request.total_s, labels)
        if request.cache != "none":
            self._lookups.inc(1, {"model": self._label(request.model), "result": request.cache})
        if request.cache == "miss":
            self._last_cache_bytes = request.cache_bytes
            self._cache_bytes.set(request.cache_bytes)
        if request.key:
            self._record_key(request)

    def record_replicas(self, running: Mapping[str, int]) -> None:
        """Record the running replicas by deployment, and the size of the response cache again."""
        for deployment, count in running.items():
            self._replicas.set(count, {"deployment": deployment})
        self._cache_bytes.set(self._last_cache_bytes)

    def record_lost_spans(self, spans: int) -> None:
        self._lost_spans.inc(spans)

    def _record_key(self, request: RequestRecord) -> None:
        self._key_requests.inc(1, {"key": request.key, "status": str(request.status)})
        labels = {"key": request.key, "compute": request.compute}
        if request.timings.tokens:
            self._key_tokens.inc(request.timings.tokens, labels)
        if request.compute_s:
            self._key_seconds.inc(request.compute_s, labels)


class EncoderMetrics:
    def __init__(self) -> None:
        self._label = ModelLabels()
        self._items = _counter("items", "Texts computed", PASS_LABELS)
        self._tokens = _counter("tokens", "Tokens computed, padding excluded", PASS_LABELS)
        self._padding = _counter("padding_tokens", "Padding computed", PASS_LABELS)
        self._queue = _duration("queue", "Longest wait for an engine thread", PASS_LABELS)
        self._forward = _duration("forward", "Forward pass", PASS_LABELS)
        self._batch = Histogram(
            f"{PREFIX}_batch_items",
            "Items in a forward pass",
            boundaries=SIZE_BUCKETS,
            tag_keys=PASS_LABELS,
        )
        self._waiting = Gauge(f"{PREFIX}_waiting_items", "Texts in the queue when a pass ended")
        self._waiting_s = Gauge(
            f"{PREFIX}_waiting_seconds", "Predicted time of the queue when a pass ended"
        )

    def record(self, done: ForwardPassRecord) -> None:
        labels = {"model": self._label(done.model), "compute": done.compute}
        self._items.inc(done.items, labels)
        self._tokens.inc(done.tokens, labels)
        if done.padded_tokens > done.tokens:
            self._padding.inc(done.padded_tokens - done.tokens, labels)
        self._queue.observe(done.queue_s, labels)
        self._forward.observe(done.forward_s, labels)
        self._batch.observe(done.items, labels)
        self._waiting.set(done.waiting_items)
        self._waiting_s.set(done.waiting_s)

    def record_idle(self) -> None:
        """Record that no text waits."""
        self._waiting.set(0)
        self._waiting_s.set(0.0)


class GeneratorMetrics:
    def __init__(self) -> None:
        self._label = ModelLabels()
        self._prompt = _counter(
            "prompt_tokens", "Prompt tokens computed, cached prefixes excluded", PASS_LABELS
        )
        self._answers = _counter("generated_tokens", "Generated tokens", PASS_LABELS)
        self._drafted = _counter("draft_tokens", "Draft tokens verified", PASS_LABELS)
        self._accepted = _counter("accepted_draft_tokens", "Draft tokens accepted", PASS_LABELS)
        self._step = _duration("generation_step", "One step of a generator", PASS_LABELS)
        self._active = Gauge(
            f"{PREFIX}_running_requests", "Requests with a KV slot", tag_keys=PASS_LABELS
        )
        self._waiting = Gauge(
            f"{PREFIX}_waiting_requests", "Requests waiting for a KV slot", tag_keys=PASS_LABELS
        )
        self._waiting_s = Gauge(
            f"{PREFIX}_generation_waiting_seconds",
            "Predicted time of the requests waiting for a KV slot",
            tag_keys=PASS_LABELS,
        )
        self._recorded: dict[tuple[str, str], dict[str, str]] = {}  # labels of gauges that were set

    def record(self, done: StepRecord) -> None:
        labels = {"model": self._label(done.model), "compute": done.compute}
        self._recorded[labels["model"], done.compute] = labels
        for counter, tokens in (
            (self._prompt, done.prompt_tokens),
            (self._answers, done.answer_tokens),
            (self._drafted, done.draft_tokens),
            (self._accepted, done.accepted_draft_tokens),
        ):
            if tokens:
                counter.inc(tokens, labels)
        self._step.observe(done.step_s, labels)
        self._set_gauges(labels, done.active, done.waiting, done.waiting_s)

    def record_idle(self) -> None:
        """Record that no request runs or waits."""
        for labels in list(self._recorded.values()):
            self._set_gauges(labels, 0, 0, 0.0)

    def _set_gauges(
        self, labels: dict[str, str], active: int, waiting: int, waiting_s: float
    ) -> None:
        self._active.set(active, labels)
        self._waiting.set(waiting, labels)
        self._waiting_s.set(waiting_s, labels)


class TokenizerMetrics:
    def __init__(self) -> None:
        self._label = ModelLabels()
        self._tokenization = _duration(
            "tokenization", "Tokenization of one micro-batch", ("model",)
        )
        self._lookups = _counter(
            "tokenization_cache_lookups", "Texts looked up in the tokenization cache", CACHE_LABELS
        )

    def record(self, done: TokenizeRecord) -> None:
        self._tokenization.observe(done.tokenize_s, {"model": self._label(done.model)})
        for result, count in (("hit", done.cache_hits), ("miss", done.texts - done.cache_hits)):
            if count:
                self._lookups.inc(count, {"model": self._label(done.model), "result": result})


class LoadMetrics:
    """Metrics of the load that a replica of any kind also reports for autoscaling."""

    def __init__(self, deployment: str) -> None:
        labels = {"deployment": deployment}
        self._busy = Gauge(
            f"{PREFIX}_busy_ratio", "Share of the replica's capacity in use", tag_keys=tuple(labels)
        )
        self._queued = Gauge(
            f"{PREFIX}_queued_seconds",
            "Time that the replica needs for the work that waits for it",
            tag_keys=tuple(labels),
        )
        for gauge in (self._busy, self._queued):
            gauge.set_default_tags(labels)

    def record(self, load: Load) -> None:
        self._busy.set(load.busy)
        self._queued.set(load.queued_s)


def _counter(name: str, description: str, labels: tuple[str, ...]) -> Counter:
    return Counter(f"{PREFIX}_{name}", description, tag_keys=labels)


def _duration(stage: str, description: str, labels: tuple[str, ...]) -> Histogram:
    return Histogram(
        f"{PREFIX}_{stage}_seconds", description, boundaries=DURATION_BUCKETS, tag_keys=labels
    )
