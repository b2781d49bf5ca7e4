"""What one request leaves to another request of its connection, and to the metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import IngressUserConfig, TracingSettings
from deployments.ingress.http import span_export
from tests.support.asgi_client import AsgiClient, lifespan
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

EMBED = ("/embed", {"inputs": "a"})


def encode(headers: dict[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode(), value.encode()) for name, value in headers.items())


def pipelining(app: ASGIApp, start_next: Callable[[], object]) -> ASGIApp:
    """Call `start_next` inside the `send` of the response, as uvicorn starts the next request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_then_start(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                start_next()

        await app(scope, receive, send_then_start)

    return call


async def test_pipelined_request_has_no_spans_of_the_request_before_it(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "open_exporter", lambda _settings: exported)
    settings = IngressUserConfig(tracing=TracingSettings(enabled=True, sample_ratio=0.0))
    sampled = encode({"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    later: list[AsgiClient] = []
    server = InProcess(tiny_store, settings=settings)
    async with server.application() as app, lifespan(app):
        pipelined = pipelining(app, lambda: later.append(AsgiClient(app, *EMBED)))
        await AsgiClient(pipelined, *EMBED, headers=sampled).task
        (second,) = later
        await second.task
    assert [record.status for record in server.recorder.records] == [200, 200]
    names = [span.name for span in exported.get_finished_spans()]
    assert "POST /embed" in names
    assert len(names) == len(set(names))


async def test_pipelined_request_without_a_route_has_no_key_of_the_request_before_it(
    tiny_store: Path, tmp_path: Path
) -> None:
    key_file = tmp_path / "keys.json"
    headers = encode(bearer(add_key(key_file, "alice")))
    later: list[AsgiClient] = []
    server = InProcess(tiny_store, settings=IngressUserConfig(key_file=key_file))
    async with server.application() as app:
        pipelined = pipelining(app, lambda: later.append(AsgiClient(app, "/no/such", {})))
        await AsgiClient(pipelined, *EMBED, headers=headers).task
        (second,) = later
        await second.task
    assert [(r.status, r.key) for r in server.recorder.records] == [(200, "alice"), (404, "")]
