"""Measurements as values; publishing them is `metrics.py`'s business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as metrics and the log line see it."""

    model: str
    task: str
    compute: str  # compute type, "cache", or "none" when it failed before the engine
    status: int
    items: int
    total_s: float


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one forward pass cost."""

    model: str
    compute: str
    items: int
    tokens: int  # real ones
    padded_tokens: int  # what the engine computed
    queue_s: float  # the longest wait in the batch
    forward_s: float
    waiting_items: int  # left in the queue, all models


class RequestRecorder(Protocol):
    """Where an ingress publishes."""

    def record(self, request: RequestRecord) -> None:
        """Publish one finished request."""
        ...


class PassRecorder(Protocol):
    """Where a lane publishes."""

    def record(self, done: PassRecord) -> None:
        """Publish one forward pass."""
        ...


class EncodeRecorder(Protocol):
    """Where a tokenizer publishes."""

    def record(self, model: str, encode_s: float) -> None:
        """Publish one encoded list."""
        ...
