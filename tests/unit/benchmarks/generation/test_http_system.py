from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.generation.http_system import BodyChunk, HttpGenerator, parse_events
from benchmarks.generation.streams import StreamRequest
from tests.support.benchmark_fakes import FakeAnswer, FakeServer

ASK = StreamRequest((5, 6, 7), 3)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def text(part: str) -> bytes:
    return event({"choices": [{"text": part}], "usage": None})


THROUGHPUT = [text("Hel"), text("lo"), event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"]


async def request(answer: FakeAnswer, wanted: StreamRequest = ASK) -> Any:
    async with FakeServer(lambda n, request: answer).running() as server:
        result = await HttpGenerator(server.target, "org/model").generate(wanted)
        (received,) = server.requests
    return result, orjson.loads(received.body)


async def test_generate_sends_a_greedy_request_and_reads_the_usage() -> None:
    answer, body = await request(FakeAnswer(body=b"".join(THROUGHPUT)))
    assert body == {
        "model": "org/model",
        "prompt": [5, 6, 7],
        "max_tokens": 3,
        "min_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (answer.text, answer.tokens, answer.cached_tokens) == ("Hello", 3, 2)
    assert len(answer.arrivals_s) == 2, "events with text"
    assert answer.submitted_s < answer.arrivals_s[0] <= answer.arrivals_s[1]
    assert answer.ids == ()


def test_parse_events_uses_the_arrival_of_the_last_byte() -> None:
    stream = b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    cut = [BodyChunk(1.0, stream[:4]), BodyChunk(2.0, stream[4:12]), BodyChunk(3.0, stream[12:])]
    assert list(parse_events(cut)) == [(2.0, b"1"), (3.0, b"2")]


async def test_generate_sets_the_first_token_event() -> None:
    first_token = asyncio.Event()
    await request(FakeAnswer(body=b"".join(THROUGHPUT)), ASK._replace(first_token=first_token))
    assert first_token.is_set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(FakeAnswer(503, b'{"error": "busy"}'), '503: {"error": "busy"}', id="status"),
        pytest.param(FakeAnswer(hang_up=True), "connection was closed", id="hung up"),
        pytest.param(FakeAnswer(raw=b"SMTP 220\r\n\r\n"), "not HTTP", id="not http"),
        pytest.param(FakeAnswer(body=text("Hel")), "without its last event", id="cut off"),
        pytest.param(
            FakeAnswer(body=text("Hel") + event({"error": {"message": "lost"}})),
            "'message': 'lost'",
            id="failed on the way",
        ),
    ],
)
async def test_generate_incomplete_stream_raises(answer: FakeAnswer, reason: str) -> None:
    with pytest.raises(BenchmarkError) as failed:
        await request(answer)
    assert reason in failed.value.message


def test_connect_rejects_a_server_without_the_model() -> None:
    without_it = FakeServer(lambda n, request: FakeAnswer(404, b"{}"))
    unknown = pytest.raises(BenchmarkError, match=r"`/models/org/model` returned 404")
    with without_it.in_thread() as server, unknown:
        HttpGenerator.connect(server.target.url, "org/model")


def test_connect_reads_the_served_version() -> None:
    described = FakeServer(lambda n, request: FakeAnswer(body=b'{"version": "0123abc"}'))
    with described.in_thread() as server:
        assert HttpGenerator.connect(server.target.url, "org/model").version == "0123abc"


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        pytest.param(FakeAnswer(422, b'{"error": "no"}'), (422, b'{"error": "no"}'), id="status"),
        pytest.param(
            FakeAnswer(
                raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
                b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n"
            ),
            (200, b"[1,2]"),
            id="in chunks",
        ),
    ],
)
async def test_post_returns_status_and_body(answer: FakeAnswer, payload: tuple[int, bytes]) -> None:
    async with FakeServer(lambda n, request: answer).running() as server:
        assert await HttpGenerator(server.target, "org/model").post("/a/path", b"{}") == payload
        (received,) = server.requests
    assert (received.method, received.path, received.body) == ("POST", "/a/path", b"{}")


async def test_post_without_response_raises_with_the_path() -> None:
    hung_up = FakeServer(lambda n, request: FakeAnswer(hang_up=True))
    async with hung_up.running() as server:
        with pytest.raises(BenchmarkError, match=r"`/a/path` of http://.* connection was closed"):
            await HttpGenerator(server.target, "org/model").post("/a/path", b"{}")
