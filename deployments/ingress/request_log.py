"""Every request leaves a record for the metrics, and a line in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.errors import ServeError
from deployments.ingress.response_cache import ResponseCache
from deployments.messages import EncoderTimings
from deployments.records import RequestRecord, RequestRecorder

log = logging.getLogger("ray.serve.hundredfold")

# Requests slower than this are worth a line at INFO.
SLOW_REQUEST_S = 1.0
# The status of a request whose client left before the end; nobody is told it.
CLIENT_CLOSED_REQUEST = 499


@dataclass(slots=True)
class RequestContext:
    """What is known of a request so far, for its record even when it fails half-way."""

    model: str = "none"
    task: str = "none"
    compute: str = "none"
    items: int = 0
    cache: Literal["hit", "miss", "none"] = "none"
    timings: EncoderTimings = field(default_factory=EncoderTimings)
    total_s: float = 0.0  # when it is over


@contextmanager
def recorded(recorder: RequestRecorder, cache: ResponseCache[Any]) -> Iterator[RequestContext]:
    """Record the request that the block answers, or fails with a ServeError."""
    record = RequestSpan(recorder)
    try:
        yield record.note
    except ServeError as error:
        error.recorded = True
        record.close(error.status, cache.bytes)
        raise
    record.close(200, cache.bytes)


class RequestSpan:
    """The record of a request that may go on after its handler has returned; made once."""

    def __init__(self, recorder: RequestRecorder) -> None:
        self.note = RequestContext()
        self._recorder = recorder
        self._started_s = time.perf_counter()
        self._closed = False

    @contextmanager
    def failing(self) -> Iterator[RequestContext]:
        """Close the record if the block fails with a ServeError, or is cancelled."""
        try:
            yield self.note
        except ServeError as error:
            error.recorded = True
            self.close(error.status)
            raise
        except asyncio.CancelledError:
            self.close(CLIENT_CLOSED_REQUEST)
            raise

    def close(self, status: int, cache_bytes: int = 0) -> None:
        """Record the request, unless that is done."""
        if not self._closed:
            self._closed = True
            self.note.total_s = time.perf_counter() - self._started_s
            _record(self._recorder, self.note, status, cache_bytes)


def record_rejection(recorder: RequestRecorder, error: ServeError, total_s: float) -> None:
    """Record a request that failed before anybody knew what it asked, unless it is recorded."""
    if not error.recorded:
        _record(recorder, RequestContext(total_s=total_s), error.status, cache_bytes=0)


def _record(recorder: RequestRecorder, note: RequestContext, status: int, cache_bytes: int) -> None:
    recorder.record(
        RequestRecord(
            model=note.model,
            task=note.task,
            compute=note.compute,
            status=status,
            items=note.items,
            total_s=note.total_s,
            cache=note.cache,
            cache_bytes=cache_bytes,
            timings=note.timings,
        )
    )
    level = log_level(status, note.total_s)
    if log.isEnabledFor(level):
        log.log(
            level,
            "%s %s status=%d compute=%s items=%d total=%.1fms",
            note.task,
            note.model,
            status,
            note.compute,
            note.items,
            note.total_s * 1e3,
        )


def log_level(status: int, total_s: float) -> int:
    """How loudly a finished request is told.

    A line for every request measured a quarter of the request path in the ingress, so the
    ordinary ones are told at DEBUG only; the metrics count them all.
    """
    if status >= 500:
        return logging.WARNING
    return logging.INFO if status >= 400 or total_s > SLOW_REQUEST_S else logging.DEBUG
