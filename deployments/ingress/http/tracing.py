"""Traces: which requests are sampled, and what the spans of a request say.

A sampled request has a span of its own, and a span per stage that the metrics measure too. Their
attributes follow OpenTelemetry's semantic conventions for HTTP servers and generative AI. Other
attributes begin with `hundredfold`.
"""

from __future__ import annotations

import random
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from deployments.config import TracingSettings
from deployments.errors import BadSetting, ClientDisconnected, ServeError
from deployments.host.machine import advise_install, installed_versions
from deployments.ingress.arrivals import current_arrival
from deployments.ingress.http.direct_requests import REQUEST_ID_KEY
from deployments.ingress.http.errors import MAX_FIELD_CHARS, shorten_text
from deployments.ingress.http.trace_context import TraceContext, read_trace_context
from deployments.messages import Finished
from deployments.rate_limit import RateLimit
from deployments.records import RequestRecord

if TYPE_CHECKING:
    from deployments.ingress.http.span_export import SpanExport

PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")  # extra `tracing`
FLUSH_TIMEOUT_S = 3.0  # time to send the last spans when the replica stops


class ClosedRecord(NamedTuple):
    """A record of a request, and what its spans need besides."""

    record: RequestRecord
    finished: Sequence[Finished]  # completions, if it is of a generation
    error_code: str | None
    closed_ns: int  # since 1970


class RequestTrace:
    """The trace of a sampled request. Its spans are built after the response is sent."""

    __slots__ = ("_export", "_records", "_route", "_span")

    def __init__(
        self, export: SpanExport, request: Request, route: str, sender: TraceContext | None
    ) -> None:
        elapsed_s = time.monotonic() - current_arrival()
        started_ns = time.time_ns() - round(elapsed_s * 1e9)
        self._export = export
        self._route = request.scope.get("root_path", "") + route
        self._span = export.start_span(f"{request.method} {self._route}", sender, started_ns)
        self._records: list[ClosedRecord] = []

    @property
    def id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def has_spans(self) -> bool:
        """False where `OTEL_SDK_DISABLED` is set."""
        return self._span.is_recording()

    def add_record(
        self,
        record: RequestRecord,
        finished: Sequence[Finished],
        error: ServeError | None,
        closed_ns: int,
    ) -> None:
        code = None if error is None else error.code  # the error itself would keep its frames
        self._records.append(ClosedRecord(record, finished, code, closed_ns))

    def end(self, request: Request, response: Response | None) -> None:
        """Build and end the spans.

        A client that has left gets no response: `response` is None, or has the status of its error.
        """
        self._span.set_attributes(describe_request(request))
        self._span.set_attribute("http.route", self._route)
        if response is not None and response.status_code != ClientDisconnected.status:
            self._span.set_attribute("http.response.status_code", response.status_code)
        for closed in self._records:
            self._describe(closed)
        self._span.end()

    def _describe(self, closed: ClosedRecord) -> None:
        """Add the attributes of a record, and the spans of its stages.

        The stages have measured lengths, but no measured begin: the last one ends with the record,
        each other one where the next begins.
        """
        status = closed.record.status
        self._span.set_attributes(describe_record(closed.record, closed.finished))
        if status >= 400:
            self._span.set_attribute("error.type", closed.error_code or str(status))
        if status >= ClientDisconnected.status:
            self._export.mark_failed(self._span)
        ends_ns = closed.closed_ns
        for name, seconds in reversed(list_stages(closed.record, closed.finished)):
            starts_ns = ends_ns - round(seconds * 1e9)
            self._export.add_stage(self._span, name, starts_ns, ends_ns)
            ends_ns = starts_ns


# None: the current task handles no sampled request.
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)


class RequestTracing:
    """Sampling of requests, and the export of their spans by the current settings.

    `record_lost` gets the number of spans that the collector did not get, from a thread.
    """

    def __init__(
        self, record_lost: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record_lost = record_lost
        self._settings = TracingSettings()
        self._export: SpanExport | None = None
        self._clock = clock
        self._limit = RateLimit(self._settings.max_traces_per_s, clock)

    def configure(self, settings: TracingSettings) -> None:
        """Apply new settings to later requests. Raises BadSetting as `open_export` does.

        The spans of requests under way get lost if their export ends.
        """
        if settings == self._settings:
            return
        if select_export(settings) != select_export(self._settings):
            former = self._export
            self._export = open_export(settings, self._record_lost) if settings.enabled else None
            if former is not None:
                former.close()
        self._settings = settings
        self._limit = RateLimit(settings.max_traces_per_s, self._clock)

    def begin(self, request: Request, route: str) -> None:
        """Begin the trace of a request to `route`, if the request is sampled.

        The sender decides if it names its own span, else chance. Requests that the gate refuses
        must not get here: only clients that it admits may cause spans.
        """
        if self._export is None:
            return
        sender = read_trace_context(request.headers)
        if sender is not None:
            is_sampled = sender.is_sampled
        else:
            is_sampled = random.random() < self._settings.sample_ratio
        if is_sampled and self._limit.take() is not None:
            trace = RequestTrace(self._export, request, route, sender)
            if trace.has_spans:
                CURRENT_TRACE.set(trace)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send the last spans at the end of the block, for at most FLUSH_TIMEOUT_S."""
        try:
            yield
        finally:
            if self._export is not None:
                await to_thread(self._export.close().join, FLUSH_TIMEOUT_S)


def explain_missing_packages() -> str | None:
    """Return what `tracing.enabled` needs here and what to do; None if nothing is missing."""
    installed = installed_versions(PACKAGES)
    missing = [package for package in PACKAGES if package not in installed]
    if not missing:
        return None
    return f"needs {' and '.join(missing)}: {advise_install('tracing')}, or set it to false"


def select_export(settings: TracingSettings) -> tuple[object, ...]:
    """Return the settings of the export itself; the others decide which requests are sampled."""
    return settings.enabled, settings.endpoint, settings.service_name


def open_export(settings: TracingSettings, record_lost: Callable[[int], None]) -> SpanExport:
    """Open the export of spans.

    Raises BadSetting if a package is missing, or if OpenTelemetry refuses one of its variables.
    """
    if reason := explain_missing_packages():
        raise BadSetting(f"IngressUserConfig: `tracing.enabled`: {reason}")
    from deployments.ingress.http.span_export import SpanExport, open_exporter

    try:
        return SpanExport(open_exporter(settings), settings.service_name, record_lost)
    except ValueError as exc:
        raise BadSetting(
            "IngressUserConfig: `tracing.enabled`: the variables `OTEL_*` of the environment are "
            f"invalid: {str(exc).rstrip('.')}. Correct them, or set it to false"
        ) from exc


def find_trace_id(request: Request) -> str | None:
    """Return the trace of which the current `request` is a part, for its log line."""
    if (trace := CURRENT_TRACE.get()) is not None:
        return trace.id
    sender = read_trace_context(request.headers)
    return None if sender is None else sender.trace_id


def describe_request(request: Request) -> dict[str, str]:
    """Return the attributes of the request itself. Texts of clients are shortened."""
    scope = request.scope
    texts = {
        "hundredfold.request_id": scope.get(REQUEST_ID_KEY, b"").decode("latin-1"),
        "url.path": scope["path"],
        "user_agent.original": request.headers.get("user-agent", ""),
    }
    return {
        "http.request.method": request.method,
        "network.protocol.version": scope["http_version"],
        # HAProxy or a gateway ends TLS and tells so.
        "url.scheme": request.headers.get("x-forwarded-proto", scope["scheme"])[:5],
        **{name: shorten_text(text, MAX_FIELD_CHARS) for name, text in texts.items() if text},
    }


def describe_record(record: RequestRecord, finished: Sequence[Finished]) -> dict[str, Any]:
    """Return the attributes that are known. `finished`: the completions, if it is a generation."""
    generated = sum(one.generated_tokens for one in finished)
    model = record.model if record.version else ""
    attributes = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": record.timings.tokens - generated,
        "gen_ai.usage.output_tokens": generated,
        "hundredfold.batch_items": record.timings.batch_items,
        "hundredfold.cache": record.cache,
        "hundredfold.compute": record.compute,
        "hundredfold.items": record.items,
        "hundredfold.key": record.key,
        "hundredfold.task": record.task,
        "hundredfold.version": record.version,
    }
    return {name: value for name, value in attributes.items() if value not in ("", "none", 0)}


def list_stages(record: RequestRecord, finished: Sequence[Finished]) -> list[tuple[str, float]]:
    """Return name and seconds of each stage. Of several completions the slowest counts."""
    if finished:
        slowest = max((one.timings for one in finished), key=sum)
        stages = [
            ("tokenize", slowest.tokenize_s),
            ("queue", slowest.queue_s),
            ("prefill", slowest.prefill_s),
            ("decode", slowest.decode_s),
        ]
    else:
        stages = [
            ("tokenize", record.timings.tokenize_s),
            ("queue", record.timings.queue_s),
            ("forward", record.timings.forward_s),
        ]
    return [(name, seconds) for name, seconds in stages if seconds]
