"""Records and log lines of requests, mostly of failed ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import EngineFailed, InputTooLong, RateLimited, UnknownModel
from deployments.ingress import request_log
from deployments.ingress.http import sse
from deployments.ingress.http.direct_requests import DirectRequests
from deployments.ingress.request_log import record_rejection
from deployments.keys.caller import Caller, set_current_caller
from deployments.keys.key import KeyLimits
from deployments.keys.limits import KeyMeter
from deployments.messages import Chunk, GenerationCall, Started
from deployments.rate_limit import RateLimit
from tests.support.artifacts import EMBEDDER
from tests.support.asgi_client import AsgiClient
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import FailingEncoder, FakeClock, ListRecorder
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

EMBED = f"/models/{EMBEDDER}"
FOUR_TEXTS = [{"name": "text", "shape": [4], "datatype": "BYTES", "data": ["a"] * 4}]
LONG_PROMPT = InputTooLong("`prompt` has 9 tokens", field="prompt")


async def test_refusals_leave_the_tokens_that_running_requests_reserve() -> None:
    clock = FakeClock()
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=600), clock)
    set_current_caller(Caller("alice", meter=meter))
    lease = meter.enter(1)
    meter.use_tokens(40)
    lease.release()
    clock.now_s += 60
    for _ in range(50):
        record_rejection(ListRecorder(), RateLimited("one at a time"), 0.0)
    meter.enter(1)
    meter.enter(1)
    with pytest.raises(RateLimited, match="600 tokens"):
        meter.enter(1)


async def read_log(
    store: Path,
    log: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    settings: IngressUserConfig,
    **headers: str,
) -> str:
    """Return the log line of a failed request that an ingress of Ray Serve answers."""
    async with InProcess(store, settings=settings).application() as app:
        transport = httpx.ASGITransport(DirectRequests(app).around(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await http.get("/health")  # the first request takes Ray Serve's wrapper
            response = await http.post(path, json=body, headers=headers)
    assert response.status_code >= 400
    (line,) = [r.getMessage() for r in log.records if r.module == "request_log"]
    return line


async def test_log_line_of_a_failed_request_has_its_id_code_and_key(
    tiny_store: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    settings = IngressUserConfig(key_file=tmp_path / "keys.json")
    key = add_key(tmp_path / "keys.json", "alice")
    headers = {**bearer(key), "x-request-id": "my-trace-1"}
    line = await read_log(tiny_store, log, EMBED, {"inputs": 7}, settings, **headers)
    assert line.startswith(f"feature-extraction {EMBEDDER} status=400 ")
    assert line.endswith(f" code=invalid_field key=alice path='{EMBED}' request='my-trace-1'")


async def test_log_line_of_a_missing_model_has_its_name(
    tiny_store: Path, log: pytest.LogCaptureFixture
) -> None:
    body = {"model": "no/such", "input": "a"}
    line = await read_log(tiny_store, log, "/v1/embeddings", body, IngressUserConfig())
    assert " code=model_not_found missing='no/such' path='/v1/embeddings' request='" in line


async def test_clients_cannot_add_lines_to_the_log(
    tiny_store: Path, log: pytest.LogCaptureFixture
) -> None:
    path = "/models/a%0Ab" + "c" * 1_000
    line = await read_log(tiny_store, log, path, {"inputs": "a"}, IngressUserConfig())
    assert "\n" not in line
    assert len(line) < 600


async def test_at_most_20_lines_a_second_are_written_and_the_next_one_counts_the_others(
    tiny_store: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(request_log, "LINE_LIMIT", RateLimit(request_log.MAX_LINES_PER_S, clock))
    async with InProcess(tiny_store).client() as http:
        for _ in range(30):
            assert (await http.post(EMBED, json={"inputs": 7})).status_code == 400
        lines = [r.getMessage() for r in log.records if r.module == "request_log"]
        assert len(lines) == 20
        assert not any("have no line" in line for line in lines)
        clock.now_s += 1
        for _ in range(2):
            await http.post(EMBED, json={"inputs": 7})
    *_, late, later = [r.getMessage() for r in log.records if r.module == "request_log"]
    assert late.endswith("; 10 requests before it have no line")
    assert "have no line" not in later


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", {"inputs": "a", "truncate": "x"}, 422),
        ("/embed", {"inputs": 7}, 422),
        ("/embed", {"inputs": ["a"] * 4}, 422),
        ("/embed_sparse", {"inputs": "a"}, 424),
        ("/rerank", {"query": "a", "texts": [7]}, 422),
        ("/v1/embeddings", {"input": ["a"] * 4}, 400),
        ("/v1/completions", {"prompt": ["a"] * 4}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "stream": True},
            400,
        ),
        ("/v1/responses", {"input": "a"}, 400),
        ("/v1/responses", {"input": "a", "stream": True}, 400),
        ("/generate", {"inputs": "a", "parameters": {"top_k": -1}}, 422),
        ("/generate_stream", {"inputs": "a"}, 422),
        (f"/v2/models/{EMBEDDER}/infer", {"inputs": FOUR_TEXTS}, 400),
        (EMBED, {"inputs": ["a"] * 4}, 422),
        (EMBED, {"inputs": "a", "parameters": {"no": 1}}, 422),
        ("/models/no/such", {"inputs": "a"}, 404),
        ("/no/such/path", {}, 404),
    ],
)
async def test_status_of_the_response_is_recorded(
    path: str, body: dict[str, Any], status: int, writing_store: Path
) -> None:
    server = InProcess(
        writing_store,
        (EMBEDDER, DECODER),
        settings=IngressUserConfig(limits=LimitSettings(items=3)),
        generator=ScriptedGeneratorClient(lambda call: ScriptedReply(refusal=LONG_PROMPT)),
    )
    async with server.client() as http:
        response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    assert [record.status for record in server.recorder.records] == [status]


class LateRefusal(ScriptedGeneratorClient):
    """Generator that finds after the begin of the answer that its model is gone."""

    def __init__(self) -> None:
        gone = UnknownModel("gone")
        gone.model_id = DECODER
        super().__init__(lambda call: ScriptedReply(refusal=gone))
        self.may_answer = asyncio.Event()

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        await self.may_answer.wait()
        async with aclosing(super().stream(call)) as events:
            async for event in events:
                yield event


async def test_stream_that_begins_without_its_model_is_recorded(
    writing_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot run again, because its client has the status."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    generator = LateRefusal()
    server = InProcess(writing_store, (EMBEDDER, DECODER), generator=generator)
    async with server.application() as app:
        client = AsgiClient(app, "/v1/completions", {"prompt": "a", "stream": True})
        await client.wait_for_text(sse.COMMENT.decode())
        generator.may_answer.set()
        await client.task
    assert "gone" in client.text
    assert [record.status for record in server.recorder.records] == [404]


async def test_failure_of_the_engine_is_a_warning_whatever_its_status(
    tiny_store: Path, log: pytest.LogCaptureFixture
) -> None:
    server = InProcess(tiny_store, encoder=FailingEncoder(EngineFailed("broken")))
    async with server.client() as http:
        response = await http.post("/embed", json={"inputs": "a"})
    assert response.status_code == 424
    levels = [r.levelno for r in log.records if r.module == "request_log"]
    assert levels == [logging.WARNING]
