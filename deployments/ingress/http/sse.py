"""Server-Sent Events: a response that is sent while its content is generated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.errors import ServeError, forget_frames
from deployments.ingress.http.errors import truncate_error

log = logging.getLogger("ray.serve.hundredfold")

# Without these headers, proxies buffer the whole response and caches store it.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# Seconds between comments, which clients ignore. Proxies close a connection that has been silent
# for a minute. By default, `cold_start_wait_s` is shorter. A request without a running replica
# therefore fails before the response starts, with a status that clients retry.
KEEP_ALIVE_S = 30.0
COMMENT = b": waiting for tokens\n\n"
# UTF-8 of NEXT LINE, LINE SEPARATOR and PARAGRAPH SEPARATOR. In JSON they occur in strings only.
_LINE_ENDS = {ch.encode(): b"\\u%04x" % ord(ch) for ch in "\x85\u2028\u2029"}


class Closable(Protocol):
    """Source of the events, closed at the end of the response."""

    async def aclose(self) -> None:
        """Release the resources of the source; later calls do nothing."""
        ...


class SseResponse(Response):
    """Response that sends `events`. Each item has one or several whole events.

    The response closes the optional `source` at the end, on a write timeout, after a failure and
    when the client disconnects. Plain ASGI reports a disconnect by a message, Ray Serve by
    cancelling the task. A failure is sent as the last event, which `encode_error` builds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closable | None,
        encode_error: Callable[[ServeError], bytes],
        *,
        stream_write_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **(headers or {})})
        self.events = events
        self.source = source
        self._encode_error = encode_error
        self._write_timeout_s = stream_write_timeout_s
        self._sent_s = 0.0  # time of the last event or comment, on the clock of the event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            disconnect.cancel()
            if self.source is not None:
                await self.source.aclose()
            await asyncio.gather(sending, disconnect, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        async with aclosing(self.events), aclosing(self._read_events()) as events:
            try:
                await send(start)
                async with self._sending_comments(send):
                    async for body in events:
                        await self._send_body(send, body)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (TimeoutError, OSError) as exc:
                log.info("stream closed, the client does not read: %r", exc)

    async def _send_body(self, send: Send, body: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(self._write_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    @asynccontextmanager
    async def _sending_comments(self, send: Send) -> AsyncGenerator[None, None]:
        """Send comments while no event comes, as when a long tool call is held back."""
        self._sent_s = asyncio.get_running_loop().time()
        comments = asyncio.create_task(self._send_comments(send))
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)

    async def _send_comments(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._sent_s + KEEP_ALIVE_S - now())
            if now() >= self._sent_s + KEEP_ALIVE_S:
                await self._send_body(send, COMMENT)

    async def _read_events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; a failure becomes the last event."""
        try:
            async for body in self.events:
                yield body
        except ServeError as error:
            forget_frames(error)
            yield self._encode_error(truncate_error(error))
        except Exception as error:
            log.exception("unexpected failure of a stream")
            forget_frames(error)
            yield self._encode_error(ServeError("unexpected failure; see the log of the server"))


async def start_stream(
    start: Coroutine[Any, Any, SseResponse],
    encode_error: Callable[[ServeError], bytes],
    *,
    stream_write_timeout_s: float,
) -> Response:
    """Return the result of `start`, or a response that sends comments until `start` finishes.

    `start` may wait for a KV slot and for a long prompt. Raises the error of `start` if
    it fails within KEEP_ALIVE_S. A later error is the only event of the response.
    """
    starting = asyncio.create_task(start)
    try:
        await asyncio.wait((starting,), timeout=KEEP_ALIVE_S)
    except asyncio.CancelledError:  # the client has left
        await _LateStream(starting).aclose()
        raise
    if starting.done():
        return starting.result()
    late = _LateStream(starting)
    return SseResponse(
        late.read_events(), late, encode_error, stream_write_timeout_s=stream_write_timeout_s
    )


class _LateStream:
    """Stream that starts after its response. Until then, the response sends comments."""

    def __init__(self, starting: asyncio.Task[SseResponse]) -> None:
        self._starting = starting

    async def read_events(self) -> AsyncGenerator[bytes, None]:
        while not self._starting.done():
            yield COMMENT
            await asyncio.wait((self._starting,), timeout=KEEP_ALIVE_S)
        async with aclosing(self._starting.result().events) as events:
            async for body in events:
                yield body

    async def aclose(self) -> None:
        self._starting.cancel()
        (started,) = await asyncio.gather(self._starting, return_exceptions=True)
        if isinstance(started, SseResponse) and started.source is not None:
            await started.source.aclose()


def build_event(json: bytes) -> bytes:
    """Build one event from a line of JSON.

    Some clients, such as huggingface_hub, split events at all line ends of Unicode.
    """
    for character, escape in _LINE_ENDS.items():
        if character in json:
            json = json.replace(character, escape)
    return b"data: " + json + b"\n\n"


def build_named_event(name: str, json: bytes) -> bytes:
    """Build one event that clients recognize by its name."""
    return b"event: %s\n" % name.encode() + build_event(json)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
