"""Handshake between a client and a replica, and errors that close the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

from deployments.errors import ReplicasLost
from deployments.transports.channel.client_connection import ChannelRequest, ClientConnection
from deployments.transports.channel.endpoint import NONCE_BYTES, Endpoint, encode_hello
from deployments.transports.channel.frames import (
    WIRE_VERSION,
    Frame,
    FrameType,
    Method,
    encode_call,
    encode_count,
    encode_frame,
)
from deployments.transports.channel.server import ServerConnection
from tests.support.channels import NODE, connected_pool, running_replica, send, server_loads, until
from tests.support.fakes import TIMEOUT_S

OTHER_USER = os.getuid() + 1


async def test_socket_directory_is_private_and_removed() -> None:
    async with running_replica() as replica:
        path = Path(replica.endpoint.unix)
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()


async def test_missing_unix_socket_falls_back_to_tcp() -> None:
    async with running_replica() as replica:
        Path(replica.endpoint.unix).unlink()
        async with connected_pool(replica) as pool:
            assert await send(pool, b"echo") == b"echo"


def hello(version: int = WIRE_VERSION) -> bytes:
    return version.to_bytes(2, "little") + encode_hello(bytes(32))[2:]


def message(kind: FrameType, body: bytes = b"") -> bytes:
    return b"".join(encode_frame(kind, 1, body))


async def connect(endpoint: Endpoint) -> ClientConnection:
    """Connect by Unix socket, and wait until the handshake has succeeded or failed."""

    def build() -> ClientConnection:
        return ClientConnection(endpoint.key, asyncio.Event())

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        _, connection = await loop.create_unix_connection(build, endpoint.unix)
        await until(lambda: connection.is_ready or connection.closed.done())
    return connection


async def test_client_with_a_wrong_secret_is_refused() -> None:
    async with running_replica() as replica:
        connection = await connect(replica.endpoint._replace(secret="00" * 32))
        assert not connection.is_ready
        assert not replica.server.connections


async def test_client_refuses_a_server_with_a_wrong_secret(tmp_path: Path) -> None:
    async def impersonate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(message(FrameType.HELLO, hello())))
        challenge = bytes(NONCE_BYTES) + bytes(32)  # a nonce and a signature
        writer.write(message(FrameType.CHALLENGE, challenge))
        writer.write(message(FrameType.READY, encode_count(1_000)))
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()

    path = str(tmp_path / "replica.sock")
    async with await asyncio.start_unix_server(impersonate, path):
        connection = await connect(Endpoint(WIRE_VERSION, NODE, path, "", 0, "ab" * 32))
        connection.close()
        assert not connection.is_ready


async def test_server_refuses_a_client_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b""
    async with running_replica() as replica, asyncio.timeout(TIMEOUT_S):
        monkeypatch.setattr(os, "getuid", lambda: OTHER_USER)
        reader, writer = await asyncio.open_unix_connection(replica.endpoint.unix)
        writer.write(message(FrameType.HELLO, hello()))
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read(1)
        writer.close()
    assert answer == b"", "the server sends no challenge"


async def test_client_refuses_a_server_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greetings: asyncio.Queue[bytes] = asyncio.Queue()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greetings.put_nowait(await reader.read(1))
        writer.close()

    path = str(tmp_path / "replica.sock")
    async with await asyncio.start_unix_server(greet, path):
        monkeypatch.setattr(os, "getuid", lambda: OTHER_USER)
        connection = await connect(Endpoint(WIRE_VERSION, NODE, path, "", 0, "ab" * 32))
        assert not connection.is_ready
        async with asyncio.timeout(TIMEOUT_S):
            assert await greetings.get() == b"", "the client sends no hello"


@pytest.mark.parametrize(
    "sent",
    [
        message(FrameType.CALL, encode_call(Method.INFER, 1, 1)),
        message(FrameType.PING),
        message(FrameType.HELLO, hello(version=WIRE_VERSION + 1)),
        message(FrameType.HELLO, b"short"),
        message(FrameType.HELLO, hello()) + message(FrameType.PROOF, bytes(32)),
        message(FrameType.HELLO, hello()) * 2,
        message(FrameType.PROOF, bytes(32)),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(random.Random(1).randbytes(500)),
    ],
)
async def test_nothing_is_accepted_before_the_handshake(sent: bytes) -> None:
    async with running_replica() as replica:
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.endpoint.port)
        writer.write(sent)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # the server sends at most a challenge, then closes
        writer.close()
        assert replica.replica.started == []
        assert not replica.server.connections


async def test_client_that_connects_while_the_replica_stops_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greetings: list[tuple[ServerConnection, Frame]] = []
    async with running_replica() as replica:
        with monkeypatch.context() as patch:
            patch.setattr(ServerConnection, "handle_frame", lambda *each: greetings.append(each))
            connecting = asyncio.create_task(connect(replica.endpoint))
            await until(lambda: greetings)
        replica.server.is_draining = True
        connection, frame = greetings[0]
        connection.handle_frame(frame)
        client = await connecting
        async with asyncio.timeout(TIMEOUT_S):
            await client.closed
        assert client.is_draining


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.ANSWER, FrameType.GOAWAY])
async def test_connection_with_a_wrong_frame_is_closed(kind: FrameType) -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        (connection,) = pool.connections()
        connection.send(kind)
        async with asyncio.timeout(TIMEOUT_S):
            await connection.closed


async def test_unknown_method_and_repeated_id_close_the_connection() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        with pytest.raises(ReplicasLost):
            await pool.call(ChannelRequest(Method.DECODE, b"", 1))
        await until(lambda: pool.connected == 1)
        (connection,) = pool.connections()
        for _ in range(2):
            connection.send(FrameType.CALL, 99, encode_call(Method.INFER, 1, 1), b"wait")
        async with asyncio.timeout(TIMEOUT_S):
            await connection.closed
        await until(lambda: server_loads(replica) == 0)


def test_endpoint_survives_metadata_and_refuses_other_versions() -> None:
    endpoint = Endpoint(WIRE_VERSION, "node", "/tmp/x", "127.0.0.1", 1234, "ab")
    assert Endpoint.from_metadata(endpoint.to_metadata()) == endpoint
    assert Endpoint.from_metadata(endpoint._replace(wire=WIRE_VERSION + 1).to_metadata()) is None
    assert Endpoint.from_metadata({}) is None
