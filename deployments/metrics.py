"""Every metric, with unit, buckets and labels. Recorded from values, one place per process.

Ray's agents export them on every node with the prefix `ray_`; `GET /metrics` gathers them from
all nodes (ingress/apis/operations), so it does not matter which ingress replica is asked.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.records import ForwardPassRecord, RequestRecord, StepRecord, TokenizeRecord

PREFIX = "hundredfold"
# Seconds, from a fifth of a millisecond to 26 s, each bucket twice the one before.
DURATION_BUCKETS = [0.0002 * 2**n for n in range(18)]
SIZE_BUCKETS = [float(2**n) for n in range(11)]  # items: 1 to 1024

REQUEST_LABELS = ("model", "task", "compute", "status")
PASS_LABELS = ("model", "compute")
CACHE_LABELS = ("model", "result")  # hit or miss


class IngressMetrics:
    """Metrics of an ingress replica."""

    def __init__(self) -> None:
        self._requests = _counter("requests", "Requests answered, by status", REQUEST_LABELS)
        self._seconds = _duration("request", "Whole request inside the ingress", REQUEST_LABELS)
        self._lookups = _counter(
            "response_cache_lookups", "Looks into the response cache", CACHE_LABELS
        )
        self._cache_bytes = Gauge(f"{PREFIX}_response_cache_bytes", "Bytes in the response cache")

    def record(self, request: RequestRecord) -> None:
        """Publish one finished request."""
        labels = {
            "model": request.model,
            "task": request.task,
            "compute": request.compute,
            "status": str(request.status),
        }
        self._requests.inc(1, labels)
        self._seconds.observe(request.total_s, labels)
        if request.cache != "none":
            self._lookups.inc(1, {"model": request.model, "result": request.cache})
        if request.cache == "miss":
            self._cache_bytes.set(request.cache_bytes)


class EncoderMetrics:
    """Metrics of an encoder replica."""

    def __init__(self) -> None:
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
        self._waiting = Gauge(f"{PREFIX}_waiting_items", "Texts waiting when a pass ended")

    def record(self, done: ForwardPassRecord) -> None:
        """Publish one forward pass."""
        labels = {"model": done.model, "compute": done.compute}
        self._items.inc(done.items, labels)
        self._tokens.inc(done.tokens, labels)
        if done.padded_tokens > done.tokens:
            self._padding.inc(done.padded_tokens - done.tokens, labels)
        self._queue.observe(done.queue_s, labels)
        self._forward.observe(done.forward_s, labels)
        self._batch.observe(done.items, labels)
        self._waiting.set(done.waiting_items)


class GeneratorMetrics:
    """Metrics of a generator replica."""

    def __init__(self) -> None:
        self._prompt = _counter(
            "prompt_tokens", "Tokens of prompts that were computed, not found", PASS_LABELS
        )
        self._answers = _counter("generated_tokens", "Tokens of answers", PASS_LABELS)
        self._drafted = _counter("draft_tokens", "Tokens guessed, and verified", PASS_LABELS)
        self._accepted = _counter(
            "accepted_draft_tokens", "Guessed tokens that were right", PASS_LABELS
        )
        self._step = _duration("generation_step", "One step of a generator", PASS_LABELS)
        self._active = Gauge(
            f"{PREFIX}_running_requests", "Requests being answered", tag_keys=PASS_LABELS
        )
        self._waiting = Gauge(
            f"{PREFIX}_waiting_requests", "Requests without a row", tag_keys=PASS_LABELS
        )

    def record(self, done: StepRecord) -> None:
        """Publish one step."""
        labels = {"model": done.model, "compute": done.compute}
        for counter, tokens in (
            (self._prompt, done.prompt_tokens),
            (self._answers, done.answer_tokens),
            (self._drafted, done.draft_tokens),
            (self._accepted, done.accepted_draft_tokens),
        ):
            if tokens:
                counter.inc(tokens, labels)
        self._step.observe(done.step_s, labels)
        self._active.set(done.active, labels)
        self._waiting.set(done.waiting, labels)


class TokenizerMetrics:
    """Metrics of a tokenizer replica."""

    def __init__(self) -> None:
        self._tokenization = _duration("tokenization", "Tokenization of one list", ("model",))
        self._lookups = _counter(
            "tokenization_cache_lookups", "Texts looked up in the tokenization cache", CACHE_LABELS
        )

    def record(self, done: TokenizeRecord) -> None:
        """Publish one encoded list."""
        self._tokenization.observe(done.tokenize_s, {"model": done.model})
        for result, count in (("hit", done.kept), ("miss", done.texts - done.kept)):
            if count:
                self._lookups.inc(count, {"model": done.model, "result": result})


def _counter(name: str, description: str, labels: tuple[str, ...]) -> Counter:
    return Counter(f"{PREFIX}_{name}", description, tag_keys=labels)


def _duration(stage: str, description: str, labels: tuple[str, ...]) -> Histogram:
    return Histogram(
        f"{PREFIX}_{stage}_seconds", description, boundaries=DURATION_BUCKETS, tag_keys=labels
    )
