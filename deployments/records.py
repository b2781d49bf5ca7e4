"""Measurements as values; `metrics.py` publishes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from deployments.messages import EncoderTimings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request."""

    model: str
    task: str
    compute: str  # compute type, "cache", or "none" if no engine was reached
    status: int
    items: int
    total_s: float
    cache: Literal["hit", "miss", "none"] = "none"  # none: no look-up, or failed before it
    cache_bytes: int = 0  # size of the response cache after the request
    # All zero if no encoder computed.
    timings: EncoderTimings = field(default_factory=EncoderTimings)


@dataclass(frozen=True, slots=True)
class ForwardPassRecord:
    """One forward pass of an encoder."""

    model: str
    compute: str
    items: int
    tokens: int  # without padding
    padded_tokens: int
    queue_s: float  # the longest wait in the batch
    forward_s: float
    waiting_items: int  # remaining in the queue, all models


@dataclass(frozen=True, slots=True)
class TokenizeRecord:
    """Tokenization of one micro-batch."""

    model: str
    tokenize_s: float
    texts: int  # looked up in the tokenization cache
    cache_hits: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a generator."""

    model: str
    compute: str
    prompt_tokens: int  # computed in this step
    answer_tokens: int  # generated in this step
    draft_tokens: int  # verified in this step
    accepted_draft_tokens: int
    active: int  # requests with a KV slot
    waiting: int  # requests without a KV slot
    step_s: float


class RequestRecorder(Protocol):
    def record(self, request: RequestRecord) -> None: ...


class RecorderGroup:
    """Publishes each request to several recorders, in order."""

    def __init__(self, *recorders: RequestRecorder) -> None:
        self._recorders = recorders

    def record(self, request: RequestRecord) -> None:
        for recorder in self._recorders:
            recorder.record(request)


class ForwardPassRecorder(Protocol):
    def record(self, done: ForwardPassRecord) -> None: ...


class TokenizeRecorder(Protocol):
    def record(self, done: TokenizeRecord) -> None: ...


class StepRecorder(Protocol):
    def record(self, done: StepRecord) -> None: ...
