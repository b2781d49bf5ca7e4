"""Streams over a channel: the direct connection of a client to a replica."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from deployments.errors import EngineFailed
from deployments.transports.channel.frames import FrameType, Method
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ServerConnection
from tests.support.channels import (
    call,
    connected_pool,
    pool_costs,
    running_replica,
    server_loads,
    until,
)


async def read(pool: ReplicaConnections, count: int, request: bytes) -> list[bytes]:
    events: list[bytes] = []
    async with aclosing(pool.stream(call(request, method=Method.STREAM))) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    return events


async def test_stream_yields_all_events_in_order() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        replica.replica.release.set()
        events = [e async for e in pool.stream(call(b"500", method=Method.STREAM))]
        assert events == [str(n).encode() for n in range(500)]
        assert (pool_costs(pool), server_loads(replica)) == (0, 0)


async def test_closed_stream_is_cancelled_in_the_replica() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        assert len(await read(pool, 3, b"10")) == 3
        await until(lambda: replica.replica.cancelled == [b"10"])
        await until(lambda: server_loads(replica) == 0)


async def test_unread_stream_stops_at_the_window() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        sent: list[int] = []
        original = ServerConnection.send

        def count(self: ServerConnection, kind: FrameType, *parts: object) -> None:
            sent.append(kind)
            original(self, kind, *parts)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerConnection, "send", count)
            async with aclosing(pool.stream(call(b"1000", method=Method.STREAM))) as stream:
                await anext(stream)
                await until(lambda: sent.count(FrameType.EVENT) >= 64)
                await asyncio.sleep(0.05)
                assert sent.count(FrameType.EVENT) == 64


async def test_stream_is_retried_before_the_first_event_only() -> None:
    async with running_replica() as first, running_replica() as second:
        async with connected_pool(first, second) as pool:
            stream = pool.stream(call(b"0", method=Method.STREAM))
            waiting = asyncio.ensure_future(anext(stream, None))
            await until(lambda: first.replica.started or second.replica.started)
            victim, other = (first, second) if first.replica.started else (second, first)
            other.replica.release.set()
            victim.disconnect()
            assert await waiting is None
            assert other.replica.started == [b"0"]
        async with connected_pool(second) as pool:
            second.replica.release.clear()
            stream = pool.stream(call(b"1", method=Method.STREAM))
            assert await anext(stream) == b"0"
            second.disconnect()
            with pytest.raises(EngineFailed, match="lost"):
                await anext(stream)
