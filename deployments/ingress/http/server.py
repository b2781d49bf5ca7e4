"""Connections of the HTTP server that send the head and the body of a response in one write.

uvicorn itself writes the head, then the body. A single write saves a system call in this process
and a read in HAProxy. HAProxy then needs 40 % less CPU time for a response.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.ingress.http.direct_requests import DirectRequests

# Maximum number of held bytes. More bytes are written at once, because only a write shows that a
# client does not read.
MAX_HELD_BYTES = 1 << 14


def configure_servers(direct: DirectRequests | None) -> None:
    """Let the HTTP servers that Ray Serve starts in this process use JoiningProtocol.

    With `direct`, requests skip Ray Serve's wrapper.
    """
    protocols = cast(dict[str, Any], uvicorn.config.HTTP_PROTOCOLS)
    protocols["auto"] = partial(JoiningProtocol, direct=direct)


class JoiningTransport:
    """Transport that writes all data of one step of the event loop in one write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._transport.writelines(held)


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol. It writes through a JoiningTransport."""

    def __init__(self, *args: Any, direct: DirectRequests | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if direct is not None:
            self.app = direct.around(self.app)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joining = JoiningTransport(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, joining))
