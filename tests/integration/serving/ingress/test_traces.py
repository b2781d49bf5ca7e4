"""Spans that a collector gets over OTLP/HTTP, and an ingress whose collector is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from deployments.config import IngressUserConfig, TracingSettings
from deployments.ingress.http import tracing
from tests.support.asgi_client import lifespan
from tests.support.fakes import TIMEOUT_S
from tests.support.in_process import InProcess
from tests.support.otlp_collector import OtlpCollector, running_collector

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture(autouse=True)
def _sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send all spans of a test in one request when the ingress stops, however long both take."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # ms
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with running_collector() as running:
        yield running


def attributes_of(sent: ResourceSpans) -> dict[str, str]:
    """Return the attributes of the service that sent these spans."""
    return {one.key: one.value.string_value for one in sent.resource.attributes}


async def embed_then_stop(store: Path, endpoint: str | None) -> None:
    """Let an ingress with traces answer three requests and stop."""
    settings = TracingSettings.parse(
        {"enabled": True, "endpoint": endpoint, "service_name": "search"}
    )
    server = InProcess(store, settings=IngressUserConfig(tracing=settings))
    async with server.application() as app, lifespan(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for text in ("one", "two", "three"):
                response = await http.post("/embed", json={"inputs": text}, headers=SAMPLED)
                assert response.status_code == 200


async def test_collector_gets_the_spans(
    tiny_store: Path, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=mine")
    await embed_then_stop(tiny_store, f"{collector.url}/v1/traces")
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["api-key"] == "mine"
    (sent,) = collector.spans
    assert attributes_of(sent)["service.name"] == "search"
    (scope,) = sent.scope_spans
    assert {span.trace_id.hex() for span in scope.spans} == {TRACE_ID}
    requests = [span for span in scope.spans if span.name == "POST /embed"]
    assert [span.parent_span_id.hex() for span in requests] == [SPAN_ID] * 3
    stages = {span.name for span in scope.spans if span not in requests}
    assert {"tokenize", "forward"} <= stages


async def test_endpoint_of_the_environment_is_used(
    tiny_store: Path, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    await embed_then_stop(tiny_store, None)
    assert collector.paths == ["/v1/traces"]


async def test_settings_win_over_the_service_and_the_sampler_of_the_environment(
    tiny_store: Path, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes = "deployment.environment.name=test,service.name=unused"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "unused")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    await embed_then_stop(tiny_store, f"{collector.url}/v1/traces")
    (sent,) = collector.spans
    service = attributes_of(sent)
    assert service["service.name"] == "search"
    assert service["deployment.environment.name"] == "test"
    (scope,) = sent.scope_spans
    assert len([span for span in scope.spans if span.name == "POST /embed"]) == 3


async def test_requests_are_answered_while_the_collector_is_away(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # one retry, after a second
    with running_collector() as closed:
        url = closed.url
    await embed_then_stop(tiny_store, f"{url}/v1/traces")
    (line,) = (message for message in caplog.messages if "spans of traces are lost" in message)
    assert "refused" in line


async def test_ingress_stops_although_the_collector_hangs(
    tiny_store: Path, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.1)
    collector.answers.clear()
    async with asyncio.timeout(TIMEOUT_S):
        await embed_then_stop(tiny_store, f"{collector.url}/v1/traces")
    assert not collector.answers.is_set()
