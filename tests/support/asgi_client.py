"""An ASGI client that can disconnect and can stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.types import ASGIApp

from tests.support.fakes import wait_until

Message = MutableMapping[str, Any]


class AsgiClient:
    """Client that sends one request and records the messages of the response.

    After `max_messages` messages the client stops reading, so the application blocks.
    With `uploads`, it never sends the end of the body.
    """

    def __init__(  # noqa: PLR0913  tests set one or two options each
        self,
        app: ASGIApp,
        path: str,
        body: Any,
        *,
        method: str = "POST",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        max_messages: int = 1_000_000,
        uploads: bool = False,
    ) -> None:
        self.messages: list[Message] = []
        self._max_messages = max_messages
        self._body = orjson.dumps(body)
        self._sent = False
        self._uploads = uploads
        self._disconnected = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        """The body received so far."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    async def wait_for_text(self, text: str) -> None:
        """Wait until the body contains `text`. Fail if the application ends first."""
        await wait_until(lambda: text in self.text or self.task.done())
        assert text in self.text

    def disconnect(self) -> None:
        """Send `http.disconnect` to the application."""
        self._disconnected.set()

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": self._uploads}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if len(self.messages) >= self._max_messages:
            await asyncio.Event().wait()
        self.messages.append(message)


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """Run the lifespan of an application during the block."""
    stop = asyncio.Event()
    started = asyncio.Event()

    async def receive() -> dict[str, str]:
        if started.is_set():
            await stop.wait()
            return {"type": "lifespan.shutdown"}
        return {"type": "lifespan.startup"}

    async def send(_message: object) -> None:
        started.set()

    task = asyncio.ensure_future(app({"type": "lifespan"}, receive, send))
    await started.wait()
    try:
        yield
    finally:
        stop.set()
        await task
