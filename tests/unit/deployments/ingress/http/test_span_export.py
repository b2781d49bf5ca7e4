from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from deployments.ingress.http.span_export import LossReporter
from tests.support.fakes import TIMEOUT_S

THREE_SPANS = [ReadableSpan("request")] * 3


class FlakyExporter(SpanExporter):
    """Exporter that writes log lines as that of OTLP does, while the collector is away."""

    def __init__(self) -> None:
        self.is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self.is_away:
            return SpanExportResult.SUCCESS
        log = logging.getLogger(__name__)
        log.warning("connection refused, retrying")
        log.error("failed to export spans")
        return SpanExportResult.FAILURE


def test_lost_spans_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    exporter = FlakyExporter()
    lost: list[int] = []
    reporter = LossReporter(exporter, lost.append)
    reporter.export(THREE_SPANS)
    assert caplog.messages == []
    exporter.is_away = True
    for _ in range(5):
        reporter.export(THREE_SPANS)
    (line,) = caplog.messages
    assert line.endswith("connection refused, retrying")
    exporter.is_away = False
    reporter.export(THREE_SPANS)
    reporter.export(THREE_SPANS)
    (_, line) = caplog.messages
    assert line.endswith("15 are lost")
    assert lost == [3] * 5
    exporter.is_away = True
    reporter.export(THREE_SPANS)
    assert len(caplog.messages) == 3
    reporter.shutdown()


def test_log_of_the_exporter_is_its_own_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    exporter = FlakyExporter()
    LossReporter(exporter, [].append).shutdown()
    exporter.is_away = True
    exporter.export(THREE_SPANS)
    assert caplog.messages == ["connection refused, retrying", "failed to export spans"]


class WaitingExporter(SpanExporter):
    """Exporter that fails when it may, and says so in the log that all of its kind share."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.has_begun = threading.Event()
        self.may_fail = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        assert self.may_fail.wait(TIMEOUT_S)
        logging.getLogger(__name__).warning(self.reason)
        return SpanExportResult.FAILURE


def test_each_of_two_exports_at_once_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    exporters = [WaitingExporter("connection refused"), WaitingExporter("timeout")]
    threads = [
        threading.Thread(target=LossReporter(exporter, [].append).export, args=(THREE_SPANS,))
        for exporter in exporters
    ]
    for thread, exporter in zip(threads, exporters, strict=True):
        thread.start()
        assert exporter.has_begun.wait(TIMEOUT_S)
    for thread, exporter in zip(reversed(threads), reversed(exporters), strict=True):
        exporter.may_fail.set()
        thread.join(TIMEOUT_S)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "timeout",
        "connection refused",
    ]
