"""Connections whose peers do not read: what waits, and where other calls go."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from deployments.transports.channel.frames import Method
from tests.support.channels import call, connected_pool, running_replica, send, until


async def test_calls_go_to_a_replica_that_reads() -> None:
    async with (
        running_replica() as full,
        running_replica() as reading,
        connected_pool(full, reading) as pool,
    ):
        first, second = pool.connections()
        first.pause_writing()
        for _ in range(5):
            assert await send(pool, b"echo") == b"echo"
        assert (len(full.replica.started), len(reading.replica.started)) == (0, 5)
        second.pause_writing()
        waiting = asyncio.create_task(send(pool, b"echo 6"))
        await asyncio.sleep(0)
        first.resume_writing()
        assert await waiting == b"echo 6"
        assert full.replica.started == [b"echo 6"]


async def test_answer_waits_in_the_replica_until_the_client_reads() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        (connection,) = replica.server.connections
        connection.pause_writing()
        task = asyncio.create_task(send(pool, b"echo"))
        await until(lambda: replica.replica.started)
        async with connected_pool(replica) as other:
            assert await send(other, b"echo") == b"echo", "other clients are answered"
        assert replica.server.calls == 1
        assert not task.done()
        connection.resume_writing()
        assert await task == b"echo"


async def test_events_wait_in_the_replica_until_the_client_reads() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        (connection,) = replica.server.connections
        connection.pause_writing()
        async with aclosing(pool.stream(call(b"3", method=Method.STREAM))) as stream:
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: replica.replica.started)
            async with connected_pool(replica) as other:
                assert await send(other, b"echo") == b"echo", "other clients are answered"
            assert not first.done()
            connection.resume_writing()
            assert [await first, await anext(stream), await anext(stream)] == [b"0", b"1", b"2"]
