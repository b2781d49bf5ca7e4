"""A client of an ASGI application that can leave, and can stop to read."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import orjson
from starlette.types import ASGIApp

from tests.support.fakes import wait_until

Message = MutableMapping[str, Any]


class AsgiClient:
    """One request, whose answer's messages are kept as they come.

    Once `takes` messages have come it takes no more, and the application waits for ever.
    """

    def __init__(self, app: ASGIApp, path: str, body: Any, *, takes: int = 1_000_000) -> None:
        self.messages: list[Message] = []
        self._takes = takes
        self._body = orjson.dumps(body)
        self._sent = False
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.visit = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    async def sees(self, text: str) -> None:
        """Wait until the body has `text` in it."""
        await wait_until(lambda: text in self.text or self.visit.done())
        assert text in self.text

    def leave(self) -> None:
        """Close the connection, as a server tells it."""
        self._left.set()

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if len(self.messages) >= self._takes:
            await asyncio.Event().wait()
        self.messages.append(message)
