"""A call that fails in its replica gets an answer, and the other calls continue."""

from __future__ import annotations

import asyncio

import pytest

from deployments.errors import EngineFailed, InvalidField
from tests.support.channels import connected_pool, running_replica, send, server_loads, until
from tests.support.fakes import TIMEOUT_S


async def test_errors_of_the_replica_are_raised() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        with pytest.raises(InvalidField) as caught:
            await send(pool, b"fail")
        assert caught.value.field == "inputs"
        with pytest.raises(EngineFailed, match="the log of its replica"):
            await send(pool, b"bug")
        assert await send(pool, b"echo after") == b"echo after"


async def test_call_that_cannot_be_decoded_fails_alone_after_other_replicas_were_asked() -> None:
    async with (
        running_replica() as first,
        running_replica() as second,
        connected_pool(first, second) as pool,
    ):
        waiting = [asyncio.create_task(send(pool, b"call %d" % n)) for n in range(4)]
        await until(lambda: len(first.replica.started) + len(second.replica.started) == 4)
        with pytest.raises(EngineFailed, match="cannot decode the call: a map") as caught:
            await send(pool, b"undecodable")
        assert caught.value.elsewhere
        asked = first.replica.started + second.replica.started
        assert asked.count(b"undecodable") == 2
        for running in (first, second):
            running.replica.release.set()
        assert await asyncio.gather(*waiting) == [b"call %d" % n for n in range(4)]


@pytest.mark.parametrize("message", [b"panic", b"cancelled"])
async def test_call_is_answered_whatever_ends_its_handler(message: bytes) -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(EngineFailed, match="the log of its replica"):
                await send(pool, message)
        assert await send(pool, b"echo after") == b"echo after"
        assert server_loads(replica) == 0
