"""Replica end of channels: accepts connections, runs calls, drains."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from deployments.deadlines import deadline_after
from deployments.errors import EngineFailed, ServeError, hide_details
from deployments.messages import ModelRef
from deployments.replicas.model_pool import ModelPool
from deployments.transports.channel.codec import encode_error
from deployments.transports.channel.connection import FrameConnection
from deployments.transports.channel.endpoint import (
    NONCE_BYTES,
    Endpoint,
    check_signature,
    decode_hello,
    sign,
)
from deployments.transports.channel.frames import (
    WIRE_VERSION,
    CallFrame,
    ChannelError,
    Frame,
    FrameType,
    decode_call,
    decode_count,
    encode_answer,
    encode_count,
    encode_models,
)
from deployments.transports.channel.sockets import SocketDirectory

log = logging.getLogger("ray.serve.hundredfold")

# Seconds for which a client's report of its backlog is valid. Each call carries a new report. If
# all waiting calls of a client are cancelled, no call follows that could correct the last report.
BACKLOG_S = 5.0
# Maximum events of one stream that are sent and not yet read by the client. Further events wait in
# the replica's StreamBuffer, which merges them.
STREAM_WINDOW = 64


class Reply(NamedTuple):
    """An encoded answer. `cost` is the cost of a later call that forwards the answer, else 0."""

    message: bytes
    cost: int = 0


UnaryHandler = Callable[[memoryview, float], Awaitable[Reply]]
# A stream that knows its last event yields it as a Reply, which ends the stream. The event and the
# end then share one frame.
StreamHandler = Callable[[memoryview, float], AsyncGenerator[bytes | Reply, None]]


class Service(NamedTuple):
    """Handlers of a replica by Method. A handler gets an encoded message and its deadline.

    Handlers raise ServeError. `window` is the limit of the cost of all calls in the replica.
    Clients prefer a replica that has the model in its `pool`.
    """

    unary: Mapping[int, UnaryHandler]
    streams: Mapping[int, StreamHandler]
    window: int
    pool: ModelPool[Any] | None = None


class ChannelServer:
    """Server that listens on a Unix socket for its own node and on TCP for other nodes."""

    def __init__(self, service: Service, tls: ssl.SSLContext | None = None) -> None:
        self.service = service
        self._tls = tls
        self.key = secrets.token_bytes(32)
        self.load = 0  # cost of the calls in progress
        self.calls = 0  # calls in progress
        self.is_draining = False
        self.connections: set[ServerConnection] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._directory: SocketDirectory | None = None
        self._changed = asyncio.Event()
        if service.pool is not None:
            service.pool.on_change = self._report_model

    async def start(self, node: str, host: str) -> Endpoint:
        """Listen on the node's address `host` and on a Unix socket. Return both as an endpoint.

        Without a directory for the Unix socket, listen on TCP only.
        """
        loop = asyncio.get_running_loop()
        tcp = await loop.create_server(lambda: ServerConnection(self), host, 0, ssl=self._tls)
        self._servers.append(tcp)
        path = ""
        try:
            self._directory = SocketDirectory.create()
            path = self._directory.socket_path
        except OSError as error:
            log.warning("no Unix socket, only TCP: %s", error)
        if path:
            unix = await loop.create_unix_server(lambda: ServerConnection(self), path)
            self._servers.append(unix)
        port = tcp.sockets[0].getsockname()[1]
        return Endpoint(WIRE_VERSION, node, path, host, port, self.key.hex())

    @property
    def backlog(self) -> int:
        """The cost of the calls that wait in clients for this replica."""
        return sum(connection.backlog for connection in self.connections)

    def check_health(self) -> None:
        if not self.is_draining and not all(server.is_serving() for server in self._servers):
            raise EngineFailed("the replica's channel does not listen")

    async def close(self, timeout_s: float) -> None:
        """Stop listening and send GOAWAY to the clients, which disconnect after their last answer.

        Close the connections that are still open after `timeout_s`.
        """
        self.is_draining = True
        for server in self._servers:
            server.close()
        for connection in self.connections:
            connection.send(FrameType.GOAWAY)
        try:
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("channel: %d calls were not answered in %g s", self.calls, timeout_s)
        for connection in tuple(self.connections):
            connection.abort()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def add(self, connection: ServerConnection) -> None:
        self.connections.add(connection)

    def _report_model(self, ref: ModelRef, is_loaded: bool) -> None:
        body = encode_models([ref.name], are_loaded=is_loaded)
        for connection in self.connections:
            connection.send(FrameType.MODELS, 0, body)

    def discard(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        self._changed.set()

    def share_window(self) -> int:
        """Return the maximum cost that the calls of one connection may have in the replica."""
        return max(self.service.window // max(len(self.connections), 1), 1)


class _Running(NamedTuple):
    task: asyncio.Task[None]
    cost: int
    window: asyncio.Semaphore  # its value: events that the stream may still send


class ServerConnection(FrameConnection):
    """Connection to one client. A disconnect cancels the client's calls."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__()
        self._server = server
        self._nonces: tuple[bytes, bytes] | None = None
        self._running: dict[int, _Running] = {}
        self._load = 0
        self._backlog = 0
        self._backlog_s = 0.0  # loop time of the backlog report

    @property
    def backlog(self) -> int:
        """Cost of the client's waiting calls, as its latest call reported; 0 after BACKLOG_S."""
        return self._backlog if self._loop.time() - self._backlog_s < BACKLOG_S else 0

    def handle_frame(self, frame: Frame) -> None:
        if not self.is_ready:
            self._continue_handshake(frame)
        elif frame.type == FrameType.CALL:
            self._start(frame.id, decode_call(frame.body))
        elif frame.type == FrameType.CANCEL:
            if frame.id in self._running:
                self._running[frame.id].task.cancel()
        elif frame.type == FrameType.RENEW:
            self._renew(frame.id, decode_count(frame.body))
        elif frame.type == FrameType.PING:
            self.send(FrameType.PONG)
        else:
            raise ChannelError(f"a frame of type {frame.type} from a client")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for running in self._running.values():
            running.task.cancel()
        self._server.discard(self)

    def _continue_handshake(self, frame: Frame) -> None:
        if frame.type == FrameType.HELLO and self._nonces is None:
            self._nonces = decode_hello(frame.body), os.urandom(NONCE_BYTES)
            proof = sign(self._server.key, "server", *self._nonces)
            self.send(FrameType.CHALLENGE, 0, self._nonces[1], proof)
        elif frame.type == FrameType.PROOF and self._nonces is not None:
            check_signature(frame.body, sign(self._server.key, "client", *self._nonces))
            self.finish_handshake()
            self._server.add(self)
            self.send(FrameType.READY, 0, encode_count(self._server.share_window()))
            if (pool := self._server.service.pool) is not None:
                names = [ref.name for ref in pool.refs()]
                self.send(FrameType.MODELS, 0, encode_models(names, are_loaded=True))
            if self._server.is_draining:
                self.send(FrameType.GOAWAY)
        else:
            raise ChannelError(f"a frame of type {frame.type} in the handshake")

    def _start(self, id: int, call: CallFrame) -> None:
        service = self._server.service
        if id in self._running:
            raise ChannelError(f"call {id} is already in progress")
        if call.method not in service.unary and call.method not in service.streams:
            raise ChannelError(f"this replica has no method {call.method}")
        self._backlog, self._backlog_s = call.backlog, self._loop.time()
        window = asyncio.Semaphore(STREAM_WINDOW)
        deadline_s = deadline_after(call.remaining_ms / 1000)
        task = self._loop.create_task(self._run(id, call, deadline_s, window))
        self._running[id] = _Running(task, call.cost, window)
        self._count(call.cost, 1)
        # Release in a callback: a task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._release(id))

    async def _run(
        self, id: int, call: CallFrame, deadline_s: float, window: asyncio.Semaphore
    ) -> None:
        """Run a call. Send the events of a stream, then exactly one ANSWER or ERROR.

        Send neither ANSWER nor ERROR if the client has cancelled the call or has gone.
        """
        unary = self._server.service.unary.get(call.method)
        try:
            if unary is None:
                events = self._server.service.streams[call.method](call.message, deadline_s)
                reply = await self._send_events(id, events, window)
            else:
                reply = await unary(call.message, deadline_s)
            await self.wait_writable()
        except ServeError as error:
            self._end(id, FrameType.ERROR, encode_error(error))
        except ChannelError as error:
            self._end(id, FrameType.ERROR, encode_error(_build_decode_error(error)))
        except BaseException as error:
            # The client also needs the error of a panic in Rust or of a cancelled inner task.
            if _is_cancelled():
                raise
            log.error("bug: a call over a channel failed", exc_info=error)
            self._end(id, FrameType.ERROR, encode_error(hide_details(error)))
            if isinstance(error, SystemExit | KeyboardInterrupt):
                raise
        else:
            self._end(id, FrameType.ANSWER, reply.message, reply.cost)

    def _end(self, id: int, kind: FrameType, message: bytes, cost: int = 0) -> None:
        """Release a call, then send its answer or error together with the replica's load."""
        self._release(id)
        other_load = self._server.load - self._load
        header = encode_answer(other_load, self._server.share_window(), cost)
        self.send(kind, id, header, message)

    async def _send_events(
        self, id: int, events: AsyncGenerator[bytes | Reply, None], window: asyncio.Semaphore
    ) -> Reply:
        """Send the events of a stream; return its last event, or an empty reply without one."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Reply):
                    return event
                await window.acquire()
                await self.wait_writable()
                self.send(FrameType.EVENT, id, event)
        return Reply(b"")

    def _renew(self, id: int, count: int) -> None:
        if count > STREAM_WINDOW:
            raise ChannelError(f"{count} events renewed; the window is {STREAM_WINDOW}")
        if id in self._running:
            for _ in range(count):
                self._running[id].window.release()

    def _release(self, id: int) -> None:
        running = self._running.pop(id, None)
        if running is not None:
            self._count(-running.cost, -1)

    def _count(self, cost: int, calls: int) -> None:
        self._load += cost
        self._server.load += cost
        self._server.calls += calls


def _is_cancelled() -> bool:
    """Return whether this task itself was cancelled, not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _build_decode_error(error: ChannelError) -> ServeError:
    """Build the error of a call that this replica cannot decode. A newer replica may decode it."""
    log.error("a call cannot be decoded: %s", error)
    failed = EngineFailed(
        f"the replica cannot decode the call: {error}. Update all deployments to one release."
    )
    failed.elsewhere = True
    return failed
