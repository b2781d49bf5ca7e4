from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from deployments.errors import EngineFailed, ServeError
from deployments.ingress.http import sse
from deployments.ingress.http.sse import COMMENT, SseResponse, build_event, start_stream
from tests.support.asgi_client import AsgiClient
from tests.support.fakes import wait_until


class EventSource:
    """A source of events and exceptions that may hang at its end and counts calls of `aclose`."""

    def __init__(self, events: Sequence[bytes | Exception], *, hangs: bool = False) -> None:
        self._events = events
        self._hangs = hangs
        self.source_closed = 0
        self.events_closed = False

    async def aclose(self) -> None:
        self.source_closed += 1

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for event in self._events:
                if isinstance(event, Exception):
                    raise event
                yield event
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.events_closed = True

    def is_closed(self) -> bool:
        return self.source_closed == 1 and self.events_closed


def encode_error(error: ServeError) -> bytes:
    return build_event(f"{error.code}: {error.message}".encode())


def open_stream(
    source: EventSource, *, max_messages: int = 1_000, stream_write_timeout_s: float = 5.0
) -> AsgiClient:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"x-compute-type": "cpu-fake"}
        response = SseResponse(
            source.events(),
            source,
            encode_error,
            stream_write_timeout_s=stream_write_timeout_s,
            headers=headers,
        )
        await response(scope, receive, send)

    return AsgiClient(app, "/", {}, max_messages=max_messages)


async def test_stream_has_headers_and_all_events() -> None:
    source = EventSource([build_event(b"1"), build_event(b"2") + build_event(b"3")])
    client = open_stream(source)
    await client.task
    assert client.text == "data: 1\n\ndata: 2\n\ndata: 3\n\n"
    start, *bodies = client.messages
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-compute-type"] == b"cpu-fake"
    assert b"content-length" not in headers
    assert [body["more_body"] for body in bodies] == [True, True, False]
    assert source.is_closed()


async def test_error_is_the_last_event_in_the_format_of_the_api() -> None:
    source = EventSource([build_event(b"1"), EngineFailed("broken"), build_event(b"2")])
    client = open_stream(source)
    await client.task
    assert client.text == "data: 1\n\ndata: engine_failed: broken\n\n"
    assert client.messages[-1]["more_body"] is False
    assert source.is_closed()


async def test_unexpected_error_is_logged_and_sent_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = EventSource([build_event(b"1"), ZeroDivisionError("secret")])
    client = open_stream(source)
    await client.task
    assert "internal: unexpected failure" in client.text
    assert "secret" not in client.text
    assert "secret" in caplog.text
    assert source.is_closed()


async def test_client_disconnect_ends_the_stream() -> None:
    source = EventSource([build_event(b"1")], hangs=True)
    client = open_stream(source)
    await client.wait_for_text("data: 1")
    client.disconnect()
    await client.task
    assert source.is_closed()


async def test_cancellation_ends_the_stream() -> None:
    source = EventSource([build_event(b"1")], hangs=True)
    client = open_stream(source)
    await client.wait_for_text("data: 1")
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert source.is_closed()


async def test_blocked_write_ends_the_stream_after_the_timeout() -> None:
    source = EventSource([build_event(b"1"), build_event(b"2"), build_event(b"3")], hangs=True)
    client = open_stream(source, max_messages=2, stream_write_timeout_s=0.02)
    await client.task
    assert client.text == "data: 1\n\n"
    assert source.is_closed()


async def test_client_disconnect_ends_a_blocked_write() -> None:
    source = EventSource([build_event(b"1"), build_event(b"2"), build_event(b"3")])
    client = open_stream(source, max_messages=2, stream_write_timeout_s=60)
    await client.wait_for_text("data: 1")
    client.disconnect()
    await client.task
    assert source.is_closed()


async def test_broken_connection_is_not_logged_as_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    source = EventSource([build_event(b"1"), build_event(b"2")])
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("bug: an event that is never set was set")

    async def send(message: object) -> None:
        if sent:
            raise OSError("broken pipe")
        sent.append("start")

    response = SseResponse(source.events(), source, encode_error, stream_write_timeout_s=5.0)
    await response({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert source.is_closed()
    (record,) = (record for record in caplog.records if "broken pipe" in record.getMessage())
    assert (record.levelno, record.exc_info) == (logging.INFO, None)


async def test_unread_events_are_closed() -> None:
    source = EventSource([build_event(b"1")])
    client = open_stream(source)
    client.disconnect()
    await client.task
    await wait_until(lambda: source.source_closed == 1)


class LateStart:
    """A start that waits for `ready`, then returns a stream or raises `error`."""

    def __init__(self, error: ServeError | None = None) -> None:
        self.began, self.ready = asyncio.Event(), asyncio.Event()
        self.source = EventSource([build_event(b"1"), build_event(b"2")])
        self.cancelled = False
        self._error = error

    async def start(self) -> SseResponse:
        self.began.set()
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self._error is not None:
            raise self._error
        source = self.source
        return SseResponse(source.events(), source, encode_error, stream_write_timeout_s=5.0)

    def open(self) -> AsgiClient:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await start_stream(self.start(), encode_error, stream_write_timeout_s=5.0)
            await response(scope, receive, send)

        return AsgiClient(app, "/", {})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)


async def test_comments_are_sent_while_no_event_comes(impatient: None) -> None:
    going_on = asyncio.Event()

    class Paused(EventSource):
        async def events(self) -> AsyncGenerator[bytes, None]:
            async for event in super().events():
                yield event
                await going_on.wait()

    source = Paused([build_event(b"1"), build_event(b"2")])
    client = open_stream(source)
    await client.wait_for_text(f"data: 1\n\n{2 * COMMENT.decode()}")
    going_on.set()
    await client.task
    assert client.text.replace(COMMENT.decode(), "") == "data: 1\n\ndata: 2\n\n"
    assert source.is_closed()


def test_line_ends_of_unicode_are_escaped() -> None:
    """huggingface_hub splits a stream at them."""
    text = "a\u2028b\u2029c\x85d\u00e9"
    event = build_event(orjson.dumps(text)).decode()
    assert event.splitlines() == event.split("\n")[:-1]
    assert orjson.loads(event.removeprefix("data: ")) == text


async def test_stream_that_starts_soon_has_no_comment() -> None:
    slow = LateStart()
    slow.ready.set()
    client = slow.open()
    await client.task
    assert client.text == "data: 1\n\ndata: 2\n\n"
    assert slow.source.is_closed()


async def test_comments_are_sent_until_the_stream_starts(impatient: None) -> None:
    slow = LateStart()
    client = slow.open()
    await client.wait_for_text(2 * COMMENT.decode())
    slow.ready.set()
    await client.task
    assert client.text.replace(COMMENT.decode(), "") == "data: 1\n\ndata: 2\n\n"
    assert slow.source.is_closed()


async def test_late_failure_is_an_event_and_an_early_one_is_raised(impatient: None) -> None:
    slow = LateStart(EngineFailed("broken"))
    client = slow.open()
    await client.wait_for_text(COMMENT.decode())
    slow.ready.set()
    await client.task
    assert client.text.endswith("data: engine_failed: broken\n\n")
    early = LateStart(EngineFailed("broken"))
    early.ready.set()
    with pytest.raises(EngineFailed):
        await early.open().task


async def test_client_that_leaves_before_the_response_ends_the_start() -> None:
    slow = LateStart()
    client = slow.open()
    await slow.began.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert slow.cancelled


async def test_client_that_leaves_after_a_comment_ends_the_start(impatient: None) -> None:
    slow = LateStart()
    client = slow.open()
    await client.wait_for_text(COMMENT.decode())
    client.disconnect()
    await client.task
    assert slow.cancelled
