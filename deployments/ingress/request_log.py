"""Record of every request for the metrics, and log lines of slow and failed requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from deployments.errors import ClientDisconnected, DeadlineExceeded, ServeError, missing_model
from deployments.ingress.http.current_request import current_request
from deployments.ingress.http.direct_requests import REQUEST_ID_KEY
from deployments.ingress.http.error_responses import select_response_status
from deployments.ingress.http.errors import MAX_FIELD_CHARS, shorten_text
from deployments.ingress.http.tracing import CURRENT_TRACE, find_trace_id
from deployments.ingress.response_cache import ResponseCache
from deployments.keys.caller import Caller, current_caller
from deployments.messages import CallTimings, Finished, ModelRef
from deployments.rate_limit import RateLimit
from deployments.records import RequestRecord, RequestRecorder

log = logging.getLogger("ray.serve.hundredfold")

# Requests that take longer are logged at INFO.
SLOW_REQUEST_S = 1.0
# Writing a log line takes a fifth of the time that a refusal takes. Without this limit, the lines
# of many refusals would slow down accepted requests.
MAX_LINES_PER_S = 20
LINE_LIMIT = RateLimit(MAX_LINES_PER_S)  # of all lines but DEBUG
# Statuses of requests that end without an answer, although a replica may have worked on them.
UNFINISHED = frozenset({ClientDisconnected.status, DeadlineExceeded.status})
# Scope key of the PendingRecord of a request. None: the response is known and may be under way.
RECORD_KEY = "hundredfold.record"

NO_TIMINGS = CallTimings()


@dataclass(slots=True)
class RequestContext:
    """Facts for the record of a request, set as they become known. Unknown facts keep defaults."""

    model: str = "none"
    version: str = ""
    task: str = "none"
    compute: str = "none"
    items: int = 0
    cache: Literal["hit", "miss", "none"] = "none"
    timings: CallTimings = NO_TIMINGS
    finished: Sequence[Finished] = ()  # completions of a generation, also unfinished ones
    sent_tokens: float = 0.0  # estimate; used for the key's limits if the request ends unanswered
    total_s: float = 0.0  # set when the request ends
    caller: Caller = field(default_factory=current_caller)

    def set_model(self, model: ModelRef) -> None:
        self.model, self.version = model


@dataclass(slots=True)
class PendingRecord:
    """Record of a request that is answered, but may still get an error response."""

    recorder: RequestRecorder
    context: RequestContext
    status: int
    cache_bytes: int
    error: ServeError | None
    closed_ns: int = field(default_factory=time.time_ns)

    def write(self) -> None:
        context, status, error = self.context, self.status, self.error
        if error is None and status == ClientDisconnected.status:
            error = ClientDisconnected("the client left before its answer")
        # Some APIs answer a failure of the engine with a status below 500. Its record keeps 500,
        # which tells it from a mistake of the client.
        if error is not None and error.status < 500:
            status = select_response_status(error)
        tokens = context.timings.tokens
        if not tokens and status in UNFINISHED:
            tokens = round(context.sent_tokens)
        # Most refusals have no tokens. Counting them would lower the key's moving average of tokens
        # per request, which KeyMeter reserves for a new request.
        if context.caller.meter is not None and tokens:
            context.caller.meter.use_tokens(tokens)
        record = RequestRecord(
            model=context.model,
            task=context.task,
            compute=context.compute,
            status=status,
            items=context.items,
            total_s=context.total_s,
            cache=context.cache,
            cache_bytes=self.cache_bytes,
            timings=context.timings,
            key=context.caller.name,
            version=context.version,
            code="none" if error is None else error.code,
        )
        self.recorder.record(record)
        if (trace := CURRENT_TRACE.get()) is not None:
            trace.add_record(record, context.finished, error, self.closed_ns)
        _log_request(context, status, error)


class RequestSpan:
    """The record of a request, closed once: at the end of the `with` block, or by `close`.

    `_close_after` decides whether an exception of the block is recorded. If `is_streamed`, a block
    without an exception leaves the record open: the stream closes it when it ends.
    """

    __slots__ = ("_cache", "_closed", "_is_streamed", "_recorder", "_started_s", "context")

    def __init__(
        self, recorder: RequestRecorder, cache: ResponseCache[Any], *, is_streamed: bool = False
    ) -> None:
        self.context = RequestContext()
        self._recorder = recorder
        self._cache = cache
        self._is_streamed = is_streamed
        self._started_s = time.perf_counter()
        self._closed = False

    def __enter__(self) -> RequestContext:
        return self.context

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._close_after(error)
        elif not self._is_streamed:
            self.close(200)

    def _close_after(self, error: BaseException) -> None:
        """Close the record of a request that failed with a ServeError or was cancelled.

        A request that may run again is not recorded here. Other exceptions are bugs. The
        application records their responses.
        """
        if isinstance(error, asyncio.CancelledError):
            self.close(ClientDisconnected.status)
        elif isinstance(error, ServeError) and not may_run_again(error):
            self.close(error.status, error)

    def close(self, status: int, failure: BaseException | None = None) -> None:
        """Close the record. Later calls do nothing.

        The record of an HTTP request is written once its response is known. For a ServeError below
        500, the status that the client gets replaces `status`.
        """
        if self._closed:
            return
        self._closed = True
        self.context.total_s = time.perf_counter() - self._started_s
        error = failure if isinstance(failure, ServeError) else None
        record = PendingRecord(self._recorder, self.context, status, self._cache.bytes, error)
        request = current_request()
        if request is None or request.scope.get(RECORD_KEY, record) is None:
            record.write()
        else:
            request.scope[RECORD_KEY] = record


def may_run_again(error: BaseException | None) -> bool:
    """Return whether the current request runs again if its missing model can be built.

    If the model cannot be built, the application records the response. A stream that has begun to
    answer does not run again.
    """
    if error is None or missing_model(error) is None:
        return False
    request = current_request()
    return request is None or request.scope.get(RECORD_KEY, error) is not None


def write_record() -> None:
    """Write the record of the current request, whose response is known now, if it is closed.

    The record of a stream is still open. It is written when it closes.
    """
    request = current_request()
    if request is not None:
        record: PendingRecord | None = request.scope.get(RECORD_KEY)
        request.scope[RECORD_KEY] = None
        if record is not None:
            record.write()


def record_rejection(recorder: RequestRecorder, error: ServeError, total_s: float) -> None:
    """Record a request that gets the response of `error`, unless its record is written already.

    If the work has ended, its duration stays, without the time that its response took.
    Most such requests fail before their model is known, so their record has no model and task.
    """
    request = current_request()
    scope = {} if request is None else request.scope
    context = RequestContext(total_s=total_s)
    record = scope.get(RECORD_KEY, PendingRecord(recorder, context, error.status, 0, error))
    scope[RECORD_KEY] = None
    if record is not None:
        record.status, record.error = error.status, error
        record.write()


def _log_request(context: RequestContext, status: int, error: ServeError | None) -> None:
    level = select_log_level(status, context.total_s)
    if not log.isEnabledFor(level):
        return
    omitted = 0 if level == logging.DEBUG else LINE_LIMIT.take()
    if omitted is not None:
        log.log(
            level,
            "%s %s status=%d compute=%s items=%d total=%.1fms%s%s",
            context.task,
            context.model,
            status,
            context.compute,
            context.items,
            context.total_s * 1e3,
            _describe_request(context, error),
            f"; {omitted} requests before it have no line" if omitted else "",
        )


def _describe_request(context: RequestContext, error: ServeError | None) -> str:
    """Return the part of a log line that tells requests apart, such as the request id.

    Clients choose the id, the path and the name of a missing model. Their quotes keep line breaks
    out of the log.
    """
    quoted = {}
    if error is not None and (model_id := missing_model(error)) is not None:
        quoted["missing"] = model_id
    if (request := current_request()) is not None:
        quoted["path"] = request.scope["path"]
        if (request_id := request.scope.get(REQUEST_ID_KEY)) is not None:
            quoted["request"] = request_id.decode("latin-1")
        if (trace_id := find_trace_id(request)) is not None:
            quoted["trace"] = trace_id
    code = "" if error is None else f" code={error.code}"
    key = f" key={context.caller.name}" if context.caller.name else ""
    return f"{code}{key}" + "".join(
        f" {name}={shorten_text(value, MAX_FIELD_CHARS)!r}" for name, value in quoted.items()
    )


def select_log_level(status: int, total_s: float) -> int:
    """Return the level of a request's log line.

    It is WARNING from status 500, INFO from status 400 and for slow requests, else DEBUG. A line at
    INFO for every request took a quarter of the ingress's time per request.
    """
    if status >= 500:
        return logging.WARNING
    return logging.INFO if status >= 400 or total_s > SLOW_REQUEST_S else logging.DEBUG
