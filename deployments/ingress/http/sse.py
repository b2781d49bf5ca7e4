"""Server-Sent Events: an answer that is sent while it is made, for as long as somebody reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.errors import ServeError
from deployments.ingress.http.errors import truncate_error

log = logging.getLogger("ray.serve.hundredfold")

# Proxies would rather collect a whole answer, and caches keep it.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Closable(Protocol):
    """What the events are made of."""

    async def aclose(self) -> None:
        """Free it; once more does no harm."""
        ...


class SseResponse(Response):
    """Sends `events`, each item one or several whole events, and then closes `source`.

    It is closed on every way out: at the end, when the reader is gone (which plain ASGI tells by a
    message, and Ray Serve by cancelling), when the reader takes nothing for `stream_write_timeout_s`, and
    when the events fail. A failure is the last event, in the words of `encode_error`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closable,
        encode_error: Callable[[ServeError], bytes],
        *,
        stream_write_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **(headers or {})})
        self._events = events
        self._source = source
        self._tell_error = encode_error
        self._slow_reader_s = stream_write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as are wanted."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await self._source.aclose()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        async with aclosing(self._events), aclosing(self._told()) as told:
            try:
                await send(start)
                async for body in told:
                    async with asyncio.timeout(self._slow_reader_s):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (TimeoutError, OSError) as exc:
                log.info("the reader of a stream is gone: %r", exc)

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """The events, the last of them an error if they fail."""
        try:
            async for body in self._events:
                yield body
        except ServeError as error:
            yield self._tell_error(truncate_error(error))
        except Exception:
            log.exception("a stream of events failed unexpectedly")
            yield self._tell_error(
                ServeError("unexpected failure; the server's log has the details")
            )


def event_of(json: bytes) -> bytes:
    """One event that carries a line of JSON."""
    return b"data: " + json + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
