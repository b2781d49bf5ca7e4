"""Measurements as values; publishing them is `metrics.py`'s business."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from deployments.messages import EncoderTimings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as metrics and the log line see it."""

    model: str
    task: str
    compute: str  # compute type, "cache", or "none" when no engine was reached
    status: int
    items: int
    total_s: float
    cache: Literal["hit", "miss", "none"] = "none"  # none: not looked up, or failed before it
    cache_bytes: int = 0  # in the response cache when the request was done
    timings: EncoderTimings = field(
        default_factory=EncoderTimings
    )  # all zero where nothing was computed


@dataclass(frozen=True, slots=True)
class ForwardPassRecord:
    """What one forward pass cost."""

    model: str
    compute: str
    items: int
    tokens: int  # real ones
    padded_tokens: int  # what the engine computed
    queue_s: float  # the longest wait in the batch
    forward_s: float
    waiting_items: int  # left in the queue, all models


@dataclass(frozen=True, slots=True)
class TokenizeRecord:
    """What tokenizing one list took."""

    model: str
    tokenize_s: float
    texts: int  # looked up in the tokenization cache
    kept: int  # of them found there


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step of a generator did."""

    model: str
    compute: str
    prompt_tokens: int  # computed
    answer_tokens: int  # written
    draft_tokens: int  # guessed, and verified
    accepted_draft_tokens: int  # of them, those that were right
    active: int  # requests being answered
    waiting: int  # requests without a row
    step_s: float


class RequestRecorder(Protocol):
    """Where an ingress publishes."""

    def record(self, request: RequestRecord) -> None:
        """Publish one finished request."""
        ...


class RecorderGroup:
    """Publishes requests to several places."""

    def __init__(self, *recorders: RequestRecorder) -> None:
        self._recorders = recorders

    def record(self, request: RequestRecord) -> None:
        """Publish one finished request to each, in order."""
        for recorder in self._recorders:
            recorder.record(request)


class ForwardPassRecorder(Protocol):
    """Where an encoder publishes."""

    def record(self, done: ForwardPassRecord) -> None:
        """Publish one forward pass."""
        ...


class TokenizeRecorder(Protocol):
    """Where a tokenizer publishes."""

    def record(self, done: TokenizeRecord) -> None:
        """Publish one encoded list."""
        ...


class StepRecorder(Protocol):
    """Where a generator publishes."""

    def record(self, done: StepRecord) -> None:
        """Publish one step."""
        ...
