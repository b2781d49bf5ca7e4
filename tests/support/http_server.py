"""The application behind a real HTTP server on a free port, in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from deployments.ingress.http.server import JoiningProtocol
from tests.support.in_process import InProcess

TIMEOUT_S = 120.0  # maximum wait for the server to start or to stop, and for a part of a response


@dataclass(frozen=True)
class HttpServer:
    port: int
    in_process: InProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, raw: bytes, *, finish: bool = False) -> bytes:
        """Send raw bytes and return the response. With `finish`, close the sending side."""
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S) as peer:
            peer.sendall(raw)
            if finish:
                peer.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := peer.recv(65_536):
                received += chunk
        return received


@contextmanager
def serve_http(in_process: InProcess) -> Iterator[HttpServer]:
    """Serve `in_process` with uvicorn, as Ray Serve does after `configure_servers`."""
    started = threading.Event()
    started_servers: list[HttpServer] = []
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with in_process.application() as app:
            config = uvicorn.Config(
                app, http=JoiningProtocol, port=0, log_level="critical", timeout_keep_alive=1
            )
            server = uvicorn.Server(config)
            servers.append(server)
            # asyncio sets TCP_NODELAY only on sockets created with `proto=IPPROTO_TCP`. Without
            # TCP_NODELAY, responses to browsers arrive 40 ms later.
            listening = socket.socket(proto=socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            started_servers.append(HttpServer(listening.getsockname()[1], in_process))
            listening.listen()
            started.set()
            await server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert started.wait(TIMEOUT_S), "the server did not start"
        yield started_servers[0]
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the server did not stop"
