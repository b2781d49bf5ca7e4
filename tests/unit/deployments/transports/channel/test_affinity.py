from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from deployments.errors import EngineFailed, ModelUnavailable
from deployments.messages import ModelRef
from deployments.replicas.model_pool import ModelLoader, ModelPool
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.frames import (
    ChannelError,
    Method,
    decode_models,
    encode_models,
)
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ChannelServer, Reply, Service
from tests.support.artifacts import seal_tiny
from tests.support.channels import NODE, running_replica, send, until

SPREAD = 5


class PooledReplica:
    """Replica that loads the model that a message names, and answers once `release` is set."""

    def __init__(self, store: Path) -> None:
        loader = ModelLoader(lambda _: 1, lambda model: model.ref.id, lambda _ref, _model: None)
        self.pool: ModelPool[str] = ModelPool(store, loader, 2)
        self.release = asyncio.Event()
        self.release.set()
        self.calls: list[str] = []
        self.refusal: Exception | None = None

    async def infer(self, message: memoryview, _deadline_s: float) -> Reply:
        name = bytes(message).decode()
        if self.refusal is not None:
            raise self.refusal
        async with self.pool.lease(ModelRef(*name.split("@"))):
            self.calls.append(name)
            await self.release.wait()
        return Reply(message.tobytes())

    def service(self) -> Service:
        return Service({Method.INFER: self.infer}, {}, 1_000, self.pool)


@asynccontextmanager
async def cluster(
    store: Path, size: int
) -> AsyncIterator[tuple[list[PooledReplica], ReplicaConnections]]:
    async with AsyncExitStack() as stack:
        replicas = [PooledReplica(store) for _ in range(size)]
        servers = [ChannelServer(replica.service()) for replica in replicas]
        pool = ReplicaConnections("CpuEncoder", NODE, spread=SPREAD)
        stack.callback(pool.close)
        for server in servers:
            stack.push_async_callback(server.close, 0)
        pool.update(
            {str(i): await server.start(NODE, "127.0.0.1") for i, server in enumerate(servers)}
        )
        await until(lambda: pool.connected == size)
        yield replicas, pool
        for replica in replicas:
            replica.release.set()


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    ids = [f"tiny/model{number}" for number in range(8)]
    return [ModelRef(id, seal_tiny(tmp_path, id).name).name for id in ids]


def ask(pool: ReplicaConnections, name: str, cost: int = 1) -> asyncio.Task[object]:
    request = ChannelRequest(Method.INFER, name.encode(), cost, model=name)
    return asyncio.get_running_loop().create_task(pool.call(request))


async def test_calls_go_where_the_model_is_loaded(tmp_path: Path, names: list[str]) -> None:
    async with cluster(tmp_path, 3) as (replicas, pool):
        for _ in range(5):
            for name in names[:3]:
                await ask(pool, name)
        where = [{name for name in names if name in replica.calls} for replica in replicas]
        assert sum(map(len, where)) == 3, "each model is loaded by one replica"


async def test_equally_loaded_replica_of_the_own_node_goes_first() -> None:
    async with running_replica() as away, running_replica() as near:
        pool = ReplicaConnections("CpuEncoder", NODE)
        pool.update({"0": away.endpoint._replace(node="node-2"), "1": near.endpoint})
        await until(lambda: pool.connected == 2)
        for _ in range(3):
            await send(pool, b"echo")
        pool.close()
    assert (away.replica.started, near.replica.started) == ([], [b"echo"] * 3)


async def test_cold_models_spread_over_idle_replicas(tmp_path: Path, names: list[str]) -> None:
    async with cluster(tmp_path, 3) as (replicas, pool):
        for name in names:
            await ask(pool, name)
        counts = Counter(bool(replica.calls) for replica in replicas)
        assert counts[True] >= 2


async def test_hot_model_spreads_while_its_replica_is_busy(
    tmp_path: Path, names: list[str]
) -> None:
    async with cluster(tmp_path, 2) as (replicas, pool):
        for replica in replicas:
            replica.release.clear()
        calls = []
        for _ in range(SPREAD + 2):
            calls.append(ask(pool, names[0]))
            sent = len(calls)
            await until(lambda sent=sent: sum(len(each.calls) for each in replicas) == sent)
        assert sorted(len(replica.calls) for replica in replicas) == [1, SPREAD + 1]
        for replica in replicas:
            replica.release.set()
        await asyncio.gather(*calls)


async def test_extra_copy_of_a_model_that_went_idle_goes_first(
    tmp_path: Path, names: list[str]
) -> None:
    hot, steady, new = names[:3]
    async with cluster(tmp_path, 2) as (replicas, pool):
        for replica in replicas:
            replica.release.clear()
        calls = [ask(pool, hot) for _ in range(SPREAD + 2)]
        await until(lambda: all(replica.calls for replica in replicas))
        for replica in replicas:
            replica.release.set()
        await asyncio.gather(*calls)
        await ask(pool, steady)
        (owner,) = (replica for replica in replicas if steady in replica.calls)
        for _ in range(4):  # the hot model is idle meanwhile
            await ask(pool, steady)
        request = ModelRef(*new.split("@"))
        async with owner.pool.lease(request):  # a replica has room for two models
            pass
        loaded = [{ref.name for ref in replica.pool.refs()} for replica in replicas]
        assert sorted(loaded, key=len) == [{hot}, {steady, new}], "one copy is left"


async def test_refusing_replica_is_left_out(tmp_path: Path, names: list[str]) -> None:
    async with cluster(tmp_path, 2) as (replicas, pool):
        full = ModelUnavailable("no room")
        for refusing, answering in (replicas, replicas[::-1]):
            refusing.refusal, answering.refusal = full, None
            await ask(pool, names[0])
            assert answering.calls[-1] == names[0]
        replicas[0].refusal = full
        replicas[1].refusal = full
        with pytest.raises(ModelUnavailable, match="no room"):
            await ask(pool, names[0])


async def test_other_errors_are_not_retried(tmp_path: Path, names: list[str]) -> None:
    async with cluster(tmp_path, 2) as (replicas, pool):
        for replica in replicas:
            replica.refusal = EngineFailed("broken")
        with pytest.raises(EngineFailed):
            await ask(pool, names[0])


async def test_loaded_and_evicted_models_reach_the_clients(
    tmp_path: Path, names: list[str]
) -> None:
    async with cluster(tmp_path, 1) as ((replica,), pool):
        (connection,) = pool.connections()
        for name in names[:3]:  # the replica has room for two models
            await ask(pool, name)
        await until(lambda: connection.models == set(names[1:3]))
        assert pool.has_idle_replica(names[2])
        replica.release.clear()
        call = ask(pool, names[2])
        await until(lambda: connection.cost_in_flight > 0)
        assert not pool.has_idle_replica(names[2])
        replica.release.set()
        await call


async def test_new_connection_learns_what_is_loaded(tmp_path: Path, names: list[str]) -> None:
    replica = PooledReplica(tmp_path)
    replica.pool.load_now(ModelRef(*names[0].split("@")))
    server, pool = ChannelServer(replica.service()), ReplicaConnections("CpuEncoder", NODE)
    pool.update({"0": await server.start(NODE, "127.0.0.1")})
    await until(lambda: [one.models for one in pool.connections()] == [{names[0]}])
    pool.close()
    await server.close(0)


def test_lists_of_models_round_trip() -> None:
    assert decode_models(encode_models([], are_loaded=True)) == []
    body = encode_models(["a@1", "b@2"], are_loaded=False)
    assert decode_models(body) == [("a@1", False), ("b@2", False)]
    for broken in (b"a@1", b"+a\n\n", b"+\xff"):
        with pytest.raises(ChannelError):
            decode_models(broken)
