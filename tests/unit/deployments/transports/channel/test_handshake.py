"""Handshake between a client and a replica, and errors that close the connection."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from deployments.errors import ReplicasLost
from deployments.transports.channel.client import ChannelRequest
from deployments.transports.channel.endpoint import Endpoint, encode_hello
from deployments.transports.channel.frames import (
    WIRE_VERSION,
    FrameType,
    Method,
    encode_call,
    encode_frame,
)
from deployments.transports.channel.pool import ReplicaPool
from tests.support.channels import NODE, connected_pool, running_replica, send, server_loads, until


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


async def test_client_with_a_wrong_secret_is_refused() -> None:
    async with running_replica() as replica:
        pool = ReplicaPool("CpuEncoder", NODE)
        pool.update({"0": replica.endpoint._replace(secret="00" * 32)})
        await asyncio.sleep(0.2)
        assert pool.connected == 0
        assert not replica.server.connections
        pool.close()


def hello(version: int = WIRE_VERSION) -> bytes:
    return version.to_bytes(2, "little") + encode_hello(bytes(32))[2:]


def message(kind: FrameType, body: bytes = b"") -> bytes:
    return b"".join(encode_frame(kind, 1, body))


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
        with contextlib.suppress(ConnectionResetError):
            await reader.read()  # the server sends at most a challenge, then closes
        writer.close()
        assert replica.replica.started == []
        assert not replica.server.connections


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.ANSWER, FrameType.GOAWAY])
async def test_connection_with_a_wrong_frame_is_closed(kind: FrameType) -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        (connection,) = pool.connections()
        connection.send(kind)
        await connection.closed


async def test_unknown_method_and_repeated_id_close_the_connection() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        with pytest.raises(ReplicasLost):
            await pool.call(ChannelRequest(Method.DECODE, b"", 1))
        await until(lambda: pool.connected == 1)
        (connection,) = pool.connections()
        for _ in range(2):
            connection.send(FrameType.CALL, 99, encode_call(Method.INFER, 1, 1), b"wait")
        await connection.closed
        await until(lambda: server_loads(replica) == 0)


def test_endpoint_survives_metadata_and_refuses_other_versions() -> None:
    endpoint = Endpoint(WIRE_VERSION, "node", "/tmp/x", "127.0.0.1", 1234, "ab")
    assert Endpoint.from_metadata(endpoint.to_metadata()) == endpoint
    assert Endpoint.from_metadata(endpoint._replace(wire=WIRE_VERSION + 1).to_metadata()) is None
    assert Endpoint.from_metadata({}) is None
