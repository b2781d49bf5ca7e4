"""What one request leaves to another request of its connection, and to the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import IngressUserConfig, LimitSettings, TracingSettings
from deployments.ingress.builds import BuildService
from deployments.ingress.http import span_export
from deployments.messages import Chunk, GenerationCall, Started
from tests.support.artifacts import EMBEDDER
from tests.support.asgi_client import AsgiClient, lifespan
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import wait_until
from tests.support.generators import ScriptedGeneratorClient
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

EMBED = ("/embed", {"inputs": "a"})
TRACED = IngressUserConfig(tracing=TracingSettings(enabled=True))
WAITING = ("/models/acme/none", {"inputs": "a", "options": {"wait_for_model": True}})


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "open_exporter", lambda _settings: exporter)
    return exporter


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
    tiny_store: Path, exported: InMemorySpanExporter
) -> None:
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


LEAVE = pytest.mark.parametrize(
    "leave",
    [AsgiClient.disconnect, lambda client: client.task.cancel()],
    ids=["message", "cancelled task"],
)


async def check_record_of_the_client_that_left(
    client: AsgiClient, server: InProcess, exported: InMemorySpanExporter
) -> None:
    await asyncio.wait([client.task])
    server.replica.configure(IngressUserConfig())  # sends the spans
    await wait_until(lambda: bool(exported.get_finished_spans()))
    assert [(r.model, r.status) for r in server.recorder.records] == [("none", 499)]
    (span,) = exported.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "client_disconnected"
    assert "http.response.status_code" not in span.attributes


@LEAVE
async def test_client_that_leaves_while_its_model_is_built_is_recorded_once(
    leave: Callable[[AsgiClient], object],
    tiny_store: Path,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = asyncio.Event()

    async def wait_forever(*_arguments: object, **_options: object) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(BuildService, "wait_for_missing", wait_forever)
    server = InProcess(tiny_store, settings=TRACED)
    async with server.application() as app:
        client = AsgiClient(app, *WAITING)
        await waits.wait()
        leave(client)
        await check_record_of_the_client_that_left(client, server, exported)


@LEAVE
async def test_client_that_leaves_during_its_upload_is_recorded_once(
    leave: Callable[[AsgiClient], object], tiny_store: Path, exported: InMemorySpanExporter
) -> None:
    server = InProcess(tiny_store, settings=TRACED)
    async with server.application() as app:
        client = AsgiClient(app, *EMBED, uploads=True)
        await asyncio.sleep(0)  # the upload begins
        leave(client)
        await check_record_of_the_client_that_left(client, server, exported)


async def test_large_answer_that_is_refused_is_recorded_once(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(inflight_response_bytes=100_000))
    server = InProcess(tiny_store, settings=settings)
    many = ("/embed", {"inputs": ["a"] * 1_000})
    async with server.application() as app:
        unread = AsgiClient(app, *many, max_messages=1)
        await wait_until(lambda: bool(unread.messages))
        refused = AsgiClient(app, *many)
        await refused.task
        assert refused.messages[0]["status"] == 429
        unread.task.cancel()
        await asyncio.wait([unread.task])
    answered, late = server.recorder.records
    assert (answered.status, late.status) == (200, 429)
    assert late.model == EMBEDDER
    assert late.timings.tokens == answered.timings.tokens > 0


class BrokenGenerator(ScriptedGeneratorClient):
    """Generator client with a bug."""

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        raise RuntimeError("a bug")
        yield


async def test_bug_before_the_first_token_of_a_stream_is_recorded_once(writing_store: Path) -> None:
    server = InProcess(writing_store, (DECODER,), generator=BrokenGenerator(), raise_bugs=False)
    async with server.client() as http:
        body = {"model": DECODER, "prompt": "a", "stream": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 500
    assert [(r.model, r.status) for r in server.recorder.records] == [(DECODER, 500)]
