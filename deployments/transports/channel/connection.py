"""One end of a channel. It reads and writes frames; subclasses handle them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from typing import cast

from deployments.transports.channel.endpoint import HANDSHAKE_TIMEOUT_S
from deployments.transports.channel.frames import (
    MAX_BODY_BYTES,
    Buffer,
    ChannelError,
    Frame,
    FrameParser,
    FrameType,
    encode_frame,
)

log = logging.getLogger("ray.serve.hundredfold")

# The kernel ends a TCP connection if the peer does not acknowledge sent bytes for this time.
TCP_USER_TIMEOUT_MS = 10_000
KEEPALIVE_S = 5  # seconds between probes of an idle TCP connection
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class FrameConnection(asyncio.Protocol):
    """Connection that aborts if the peer breaks the protocol or does not finish the handshake."""

    def __init__(self) -> None:
        self.is_ready = False  # the handshake is done
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser()
        self.family = socket.AF_UNSPEC
        self._transport: asyncio.Transport | None = None
        self._received_s = 0.0  # loop time of the last bytes
        self._writable = asyncio.Event()
        self._writable.set()
        self._handshake_timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        self.family = sock.family
        try:
            _prepare_socket(sock)
        except ChannelError as error:
            log.warning("channel refused: %s", error)
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._received_s = self._loop.time()
        try:
            for frame in self._parser.feed(data):
                self.handle_frame(frame)
        except ChannelError as error:
            log.warning("channel closed: %s", error)
            self.abort()

    def handle_frame(self, frame: Frame) -> None:
        """Handle a frame. Raises ChannelError if the frame is not valid in this state."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._handshake_timer.cancel()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def wait_writable(self) -> None:
        """Wait until the write buffer has room. It is full while the peer does not read."""
        if not self._writable.is_set():
            await self._writable.wait()

    def send(self, kind: FrameType, id: int = 0, *parts: Buffer) -> None:
        """Write a frame; do nothing once the connection is closing or lost."""
        # When the peer ends its data, the transport closes itself one step of the event loop before
        # `connection_lost`. In between, asyncio's `writelines` raises TypeError since Python 3.12.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode_frame(kind, id, *parts))

    def finish_handshake(self) -> None:
        self.is_ready = True
        self._parser.max_body_bytes = MAX_BODY_BYTES
        self._handshake_timer.cancel()

    def close(self) -> None:
        """Close after the written frames are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _prepare_socket(sock: socket.socket) -> None:
    """Reject a Unix peer of another user. Set TCP options: no delay, early loss detection."""
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise ChannelError(f"the peer runs as user {uid}; this process as {os.getuid()}")
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
