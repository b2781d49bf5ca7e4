"""Which requests have spans, and what the spans say. The exporter keeps them in memory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.requests import Request

from deployments.config import IngressUserConfig, TracingSettings
from deployments.errors import BadSetting, EngineFailed
from deployments.host.machine import advise_install
from deployments.ingress.http import span_export, tracing
from deployments.ingress.http.direct_requests import DirectRequests
from deployments.ingress.http.tracing import CURRENT_TRACE, RequestTracing
from tests.support.artifacts import EMBEDDER
from tests.support.asgi_client import AsgiClient, lifespan
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import (
    TIMEOUT_S,
    FailingEncoder,
    FakeClock,
    HangingEncoder,
    wait_until,
)
from tests.support.generators import TIMINGS, ScriptedGeneratorClient
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

TRACED = IngressUserConfig(tracing=TracingSettings(enabled=True))
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
EMBED = ("/embed", {"inputs": ["A cat.", "A dog."]})
COMPLETE = ("/v1/completions", {"model": DECODER, "prompt": "a b c", "n": 2})


def ignore_loss(_spans: int) -> None:
    """Do nothing. The tests of LossReporter count lost spans."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "open_exporter", lambda _settings: exporter)
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", TIMEOUT_S)
    return exporter


async def send(
    server: InProcess, path: str, body: Any, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Send a request to an ingress of Ray Serve, which then stops."""
    async with server.application() as app, lifespan(app):
        transport = httpx.ASGITransport(DirectRequests(app).around(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await http.get("/health")  # the first request takes Ray Serve's wrapper
            return await http.post(path, json=body, headers=headers)


def split(exported: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the span of the only request, and those of its stages in order."""
    *stages, request = sorted(exported.get_finished_spans(), key=lambda span: span.end_time or 0)
    assert request.kind is SpanKind.SERVER
    context = request.get_span_context()
    assert context is not None
    for stage in stages:
        assert stage.kind is SpanKind.INTERNAL
        assert stage.parent is not None
        assert (stage.parent.trace_id, stage.parent.span_id) == (context.trace_id, context.span_id)
    assert [one.end_time for one in stages[:-1]] == [one.start_time for one in stages[1:]]
    return request, stages


def measure(stage: ReadableSpan) -> float:
    assert stage.start_time is not None
    assert stage.end_time is not None
    return (stage.end_time - stage.start_time) / 1e9


async def test_request_of_an_encoder_has_a_span_with_its_stages(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    server = InProcess(tiny_store, settings=TRACED)
    headers = {"x-request-id": "mine", "user-agent": "tests", "x-forwarded-proto": "https"}
    response = await send(server, *EMBED, headers)
    assert response.status_code == 200
    (record,) = server.recorder.records
    request, stages = split(exported)
    assert request.name == "POST /embed"
    assert request.parent is None
    assert request.status.status_code is StatusCode.UNSET
    assert request.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/embed",
        "network.protocol.version": "1.1",
        "url.path": "/embed",
        "url.scheme": "https",
        "user_agent.original": "tests",
        "gen_ai.request.model": EMBEDDER,
        "gen_ai.response.model": EMBEDDER,
        "gen_ai.usage.input_tokens": record.timings.tokens,
        "hundredfold.batch_items": record.timings.batch_items,
        "hundredfold.cache": "miss",
        "hundredfold.compute": record.compute,
        "hundredfold.items": 2,
        "hundredfold.request_id": "mine",
        "hundredfold.task": "feature-extraction",
        "hundredfold.version": record.version,
    }
    assert dict(request.resource.attributes)["service.name"] == "hundredfold"
    timings = record.timings
    measured = {stage.name: pytest.approx(measure(stage), abs=1e-6) for stage in stages}
    assert measured == {
        "tokenize": timings.tokenize_s,
        "queue": timings.queue_s,
        "forward": timings.forward_s,
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_request_of_a_generator_has_the_stages_of_its_slowest_completion(
    writing_store: Path, exported: InMemorySpanExporter, streamed: bool
) -> None:
    server = InProcess(
        writing_store, (DECODER,), settings=TRACED, generator=ScriptedGeneratorClient()
    )
    path, body = COMPLETE
    response = await send(server, path, {**body, "stream": streamed})
    assert response.status_code == 200
    request, stages = split(exported)
    assert request.attributes is not None
    assert request.attributes["gen_ai.response.model"] == DECODER
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert request.attributes["gen_ai.usage.output_tokens"] == 2 * 3
    assert {stage.name: round(measure(stage), 6) for stage in stages} == {
        "tokenize": TIMINGS.tokenize_s,
        "queue": TIMINGS.queue_s,
        "prefill": TIMINGS.prefill_s,
        "decode": TIMINGS.decode_s,
    }


async def test_span_of_the_sender_is_the_parent(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    await send(InProcess(tiny_store, settings=TRACED), *EMBED, SAMPLED)
    request, _ = split(exported)
    context, parent = request.get_span_context(), request.parent
    assert context is not None
    assert parent is not None
    assert f"{context.trace_id:032x}" == f"{parent.trace_id:032x}" == TRACE_ID
    assert f"{parent.span_id:016x}" == SPAN_ID


@pytest.mark.parametrize(
    ("ratio", "headers", "has_span"),
    [
        (1.0, {}, True),
        (1.0, {"traceparent": "malformed"}, True),
        (1.0, NOT_SAMPLED, False),
        (0.0, {}, False),
        (0.0, {"traceparent": "malformed"}, False),
        (0.0, SAMPLED, True),
    ],
)
async def test_sender_decides_else_chance(
    tiny_store: Path,
    exported: InMemorySpanExporter,
    ratio: float,
    headers: dict[str, str],
    has_span: bool,
) -> None:
    sampling = TracingSettings(enabled=True, sample_ratio=ratio)
    await send(InProcess(tiny_store, settings=IngressUserConfig(tracing=sampling)), *EMBED, headers)
    assert bool(exported.get_finished_spans()) == has_span


async def test_refused_keys_cause_no_spans(
    tiny_store: Path, tmp_path: Path, exported: InMemorySpanExporter
) -> None:
    settings = TRACED.model_copy(update={"key_file": tmp_path / "keys.json"})
    key = add_key(tmp_path / "keys.json", "alice")
    server = InProcess(tiny_store, settings=settings)
    refused = await send(server, *EMBED, {**SAMPLED, **bearer("wrong")})
    assert refused.status_code == 401
    assert exported.get_finished_spans() == ()
    exported_later = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_export, "open_exporter", lambda _settings: exported_later)
        await send(server, *EMBED, {**SAMPLED, **bearer(key)})
    request, _ = split(exported_later)
    assert request.attributes is not None
    assert request.attributes["hundredfold.key"] == "alice"


async def test_spans_that_the_collector_does_not_get_are_counted(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    exported.shutdown()  # then it refuses all spans
    server = InProcess(tiny_store, settings=TRACED)
    await send(server, *EMBED, SAMPLED)
    assert sum(server.lost_spans) >= 1


def test_sampled_requests_are_limited(exported: InMemorySpanExporter) -> None:
    clock = FakeClock()
    traces = RequestTracing(ignore_loss, clock)
    traces.configure(TracingSettings(enabled=True, max_traces_per_s=2))
    request = Request(
        {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/embed",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in SAMPLED.items()],
        }
    )
    begun = []
    for _ in range(6):
        CURRENT_TRACE.set(None)
        traces.begin(request, "/embed")
        begun.append(CURRENT_TRACE.get() is not None)
        if (trace := CURRENT_TRACE.get()) is not None:
            trace.end(request, None)
        clock.now_s += 0.25
    assert begun == [True, True, False, False, True, True]
    traces.configure(TracingSettings())


async def test_mistake_of_the_client_has_its_code(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    await send(InProcess(tiny_store, settings=TRACED), "/embed", {"inputs": 7})
    request, stages = split(exported)
    assert stages == []
    assert request.status.status_code is StatusCode.UNSET
    assert request.attributes is not None
    assert request.attributes["error.type"] == "invalid_field"
    assert request.attributes["http.response.status_code"] == 422


async def test_failure_of_the_server_is_an_error(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    encoder = FailingEncoder(EngineFailed("broken"))
    await send(InProcess(tiny_store, settings=TRACED, encoder=encoder), *EMBED)
    request, _ = split(exported)
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes is not None
    assert request.attributes["error.type"] == "engine_failed"
    assert request.attributes["http.response.status_code"] == 424


async def test_request_whose_client_leaves_has_no_status(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    encoder = HangingEncoder()
    server = InProcess(tiny_store, settings=TRACED, encoder=encoder)
    async with server.application() as app, lifespan(app):
        client = AsgiClient(app, *EMBED)
        await wait_until(lambda: bool(encoder.batches))
        client.task.cancel()
        await asyncio.wait([client.task])
    request, _ = split(exported)
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes is not None
    assert request.attributes["error.type"] == "client_disconnected"
    assert "http.response.status_code" not in request.attributes


async def test_routes_that_run_no_model_have_no_spans(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    server = InProcess(tiny_store, settings=TRACED)
    async with server.application() as app, lifespan(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for path in ("/health", "/v1/models", "/no/such/path"):
                await http.get(path, headers=SAMPLED)
    assert exported.get_finished_spans() == ()


async def test_new_settings_apply_to_later_requests(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        await http.post(EMBED[0], json=EMBED[1])
        server.replica.configure(TRACED)
        await http.post(EMBED[0], json=EMBED[1])
        server.replica.configure(IngressUserConfig())
        await http.post(EMBED[0], json=EMBED[1])
        await wait_until(lambda: bool(exported.get_finished_spans()))
    split(exported)


async def test_requests_under_way_keep_their_spans_when_the_sampling_changes(
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    encoder = HangingEncoder()
    server = InProcess(tiny_store, settings=TRACED, encoder=encoder)
    async with server.application() as app, lifespan(app):
        client = AsgiClient(app, *EMBED)
        await wait_until(lambda: bool(encoder.batches))
        sampling = TracingSettings(enabled=True, sample_ratio=0.5, max_traces_per_s=1)
        server.replica.configure(IngressUserConfig(tracing=sampling))
        client.disconnect()
        await client.task
    split(exported)


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "256", "max_queue_size"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "schedule_delay_millis"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
    ],
)
def test_invalid_variable_of_the_sdk_is_a_bad_setting(
    variable: str,
    value: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSetting, match=part) as caught:
        RequestTracing(ignore_loss).configure(TracingSettings(enabled=True))
    assert "`tracing.enabled`" in caught.value.message
    logging.getLogger(OTLPSpanExporter.__module__).warning("line of another exporter")
    assert "line of another exporter" in caplog.messages


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGES", ("no-such-package",))
    traces = RequestTracing(ignore_loss)
    with pytest.raises(BadSetting) as caught:
        traces.configure(TracingSettings(enabled=True))
    for part in ("tracing.enabled", "no-such-package", advise_install("tracing")):
        assert part in caught.value.message
    traces.configure(TracingSettings(service_name="other"))


async def test_log_line_names_no_trace_while_the_sdk_is_disabled(
    tiny_store: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    await send(InProcess(tiny_store, settings=TRACED), "/embed", {"inputs": 7})
    (line,) = [r.getMessage() for r in log.records if r.module == "request_log"]
    assert "trace=" not in line


@pytest.mark.parametrize("settings", [IngressUserConfig(), TRACED])
async def test_log_line_has_the_trace_of_the_sender(
    tiny_store: Path,
    exported: InMemorySpanExporter,
    log: pytest.LogCaptureFixture,
    settings: IngressUserConfig,
) -> None:
    headers = {"x-request-id": "mine", **SAMPLED}
    await send(InProcess(tiny_store, settings=settings), "/embed", {"inputs": 7}, headers)
    (line,) = [r.getMessage() for r in log.records if r.module == "request_log"]
    assert line.endswith(f" request='mine' trace='{TRACE_ID}'")


async def test_log_line_has_the_trace_that_begins_here(
    tiny_store: Path, exported: InMemorySpanExporter, log: pytest.LogCaptureFixture
) -> None:
    await send(InProcess(tiny_store, settings=TRACED), "/embed", {"inputs": 7})
    (line,) = [r.getMessage() for r in log.records if r.module == "request_log"]
    context = split(exported)[0].get_span_context()
    assert context is not None
    assert line.endswith(f" trace='{context.trace_id:032x}'")


async def test_log_line_without_a_trace_names_none(
    tiny_store: Path, log: pytest.LogCaptureFixture
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}"}
    await send(InProcess(tiny_store), "/embed", {"inputs": 7}, headers)
    (line,) = [r.getMessage() for r in log.records if r.module == "request_log"]
    assert "trace=" not in line
