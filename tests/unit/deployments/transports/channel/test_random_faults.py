from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from deployments.errors import EngineFailed, InvalidField, ReplicasLost
from deployments.transports.channel.replica_connections import NoChannel, ReplicaConnections
from tests.support.channels import (
    RunningReplica,
    connected_pool,
    pool_costs,
    running_replica,
    send,
    server_loads,
    until,
)

CALLS = 300
# Errors of calls that are refused, that lose MAX_TRIES replicas or all, or that are cancelled.
EXPECTED = (InvalidField, EngineFailed, ReplicasLost, NoChannel, asyncio.CancelledError)


async def call_once(pool: ReplicaConnections, rng: random.Random, number: int) -> None:
    content = rng.choice([b"echo %d" % number, b"wait %d" % number, b"fail"])
    with suppress(*EXPECTED):
        assert await send(pool, content, cost=rng.randint(1, 20)) == content


async def act_at_random(
    rng: random.Random, replicas: Sequence[RunningReplica], calls: Sequence[asyncio.Task[None]]
) -> None:
    """Break connections, cancel a call, or let a replica answer what waits there; or do nothing."""
    action = rng.random()
    if action < 0.1:
        rng.choice(replicas).disconnect()
    elif action < 0.2:
        rng.choice(calls).cancel()
    elif action < 0.5:
        await asyncio.sleep(0.001)
        release = rng.choice(replicas).replica.release
        release.set()
        await asyncio.sleep(0)
        release.clear()


async def test_every_call_has_one_outcome_under_random_faults() -> None:
    """Afterwards, the costs in the pool and the loads of the replicas are zero again."""
    rng = random.Random(7)
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(running_replica(window=40)) for _ in range(3)]
        pool = await stack.enter_async_context(connected_pool(*replicas))
        calls: list[asyncio.Task[None]] = []
        for number in range(CALLS):
            calls.append(asyncio.create_task(call_once(pool, rng, number)))
            await act_at_random(rng, replicas, calls)
        for replica in replicas:
            replica.replica.release.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        # A call that is cancelled before it starts has not suppressed its CancelledError.
        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
        await until(lambda: server_loads(*replicas) == 0)
        assert pool_costs(pool) == 0
