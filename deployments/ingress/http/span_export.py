"""Export of spans over OTLP/HTTP with OpenTelemetry's SDK. Only this module imports the SDK.

The SDK reads its variables from the environment: `OTEL_EXPORTER_OTLP_*`, `OTEL_BSP_*` and
`OTEL_RESOURCE_ATTRIBUTES`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from deployments import __version__
from deployments.config import TracingSettings
from deployments.ingress.http.trace_context import TraceContext

log = logging.getLogger("ray.serve.hundredfold")


class LossReporter(SpanExporter):
    """Exporter that logs once when spans begin to get lost, and once when they no longer do.

    The exporter itself would write a line per attempt. Its first line of a batch is the reason.
    `record_lost` gets the number of lost spans of each batch.
    """

    def __init__(self, exporter: SpanExporter, record_lost: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._record_lost = record_lost
        self._lost = 0
        self._exporter_log = logging.getLogger(type(exporter).__module__)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with withhold_lines(self._exporter_log) as lines:
            result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                reason = next(iter(lines), "unknown")
                log.warning("spans of traces are lost, until the collector gets them: %s", reason)
            self._lost += len(spans)
            self._record_lost(len(spans))
        elif self._lost:
            log.warning("the collector gets spans of traces again; %d are lost", self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


@contextmanager
def withhold_lines(source: logging.Logger) -> Iterator[list[str]]:
    """Keep what this thread logs to `source` during the block out of the log; yield its lines.

    Other threads are let through: after a change of the settings, the last spans of the former
    export and the first of the new one may be sent at the same time.
    """
    thread = threading.get_ident()
    lines: list[str] = []

    def withhold(record: logging.LogRecord) -> bool:
        is_own = threading.get_ident() == thread
        if is_own:
            lines.append(record.getMessage())
        return not is_own

    source.addFilter(withhold)
    try:
        yield lines
    finally:
        source.removeFilter(withhold)


class SpanExport:
    """Spans of one service, sent in batches by a thread. If its queue is full, spans get lost."""

    def __init__(
        self, exporter: SpanExporter, service_name: str, record_lost: Callable[[int], None]
    ) -> None:
        resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__})
        # RequestTracing has sampled the requests already.
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(LossReporter(exporter, record_lost)))
        self._tracer = self._provider.get_tracer("hundredfold", __version__)

    def start_span(self, name: str, sender: TraceContext | None, started_ns: int) -> Span:
        """Start the span of a request. `started_ns` and other times are nanoseconds since 1970."""
        parent = Context()
        if sender is not None:
            remote = SpanContext(
                int(sender.trace_id, 16),
                int(sender.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )
            parent = set_span_in_context(NonRecordingSpan(remote), parent)
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=started_ns)

    def add_stage(self, request: Span, name: str, starts_ns: int, ends_ns: int) -> None:
        parent = set_span_in_context(request, Context())
        self._tracer.start_span(name, parent, start_time=starts_ns).end(ends_ns)

    def mark_failed(self, span: Span) -> None:
        span.set_status(StatusCode.ERROR)

    def close(self) -> threading.Thread:
        """Let a thread send the remaining spans and then stop the export; return the thread."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        return thread


def open_exporter(settings: TracingSettings) -> SpanExporter:
    endpoint = settings.endpoint
    return OTLPSpanExporter(None if endpoint is None else str(endpoint))
