"""Records of requests, forward passes, tokenizations and generation steps, for `metrics.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from deployments.messages import CallTimings

log = logging.getLogger("ray.serve.hundredfold")

R = TypeVar("R", contravariant=True)

FLUSH_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request."""

    model: str
    task: str
    compute: str  # compute type, "cache", or "none" if the request reached no engine
    status: int
    items: int
    total_s: float
    cache: Literal["hit", "miss", "none"] = "none"  # none: no look-up in the response cache
    cache_bytes: int = 0  # size of the response cache after the request
    # All zero if no engine ran, except for `tokens` of a response from the cache.
    timings: CallTimings = field(default_factory=CallTimings)
    key: str = ""  # name of the API key; empty: none
    version: str = ""  # version of the model; empty: the request failed before the model was known
    code: str = "none"  # code of the error

    @property
    def compute_s(self) -> float:
        """Estimated compute seconds: the request's share of a pass, or the whole generation."""
        batch_items = self.timings.batch_items
        share = self.items / batch_items if batch_items else 1.0
        return self.timings.forward_s * share


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
    waiting_items: int  # items that remain in the queue, of all models
    waiting_s: float = 0.0  # predicted time of the waiting items


@dataclass(frozen=True, slots=True)
class TokenizeRecord:
    """Tokenization of one micro-batch."""

    model: str
    tokenize_s: float
    texts: int  # texts looked up in the tokenization cache
    cache_hits: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a generator."""

    model: str
    compute: str
    prompt_tokens: int  # prompt tokens computed in this step
    answer_tokens: int  # tokens generated in this step, also the first ones, from prefills
    draft_tokens: int  # draft tokens verified in this step
    accepted_draft_tokens: int
    active: int  # requests with a KV slot
    waiting: int  # requests without a KV slot
    step_s: float
    waiting_s: float = 0.0  # predicted time of the waiting requests


class Recorder(Protocol[R]):
    def record(self, record: R, /) -> None: ...


RequestRecorder: TypeAlias = Recorder[RequestRecord]
ForwardPassRecorder: TypeAlias = Recorder[ForwardPassRecord]
TokenizeRecorder: TypeAlias = Recorder[TokenizeRecord]
StepRecorder: TypeAlias = Recorder[StepRecord]


class RecorderGroup:
    """Recorder that passes each RequestRecord to several recorders, in order."""

    def __init__(self, *recorders: RequestRecorder) -> None:
        self._recorders = recorders

    def record(self, record: RequestRecord, /) -> None:
        for recorder in self._recorders:
            recorder.record(record)


class DeferredRecorder(Generic[R]):
    """Recorder that writes records from its own thread, at most FLUSH_INTERVAL_S later.

    Writing one of Ray's metrics takes 2 µs in a tight loop, but longer between requests, because
    other work has removed the code from the CPU caches. When each request wrote its metrics itself,
    the writing took 7 % of the ingress's CPU time.
    """

    def __init__(self, recorder: Recorder[R]) -> None:
        self._recorder = recorder
        self._records: deque[R] = deque()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def record(self, record: R, /) -> None:
        self._records.append(record)

    def _run(self) -> None:
        while True:
            time.sleep(FLUSH_INTERVAL_S)
            try:
                while self._records:
                    self._recorder.record(self._records.popleft())
            except Exception:
                log.exception("metrics are not recorded")
