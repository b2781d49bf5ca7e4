from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest

from deployments.errors import ReplicasLost, ReplicasSilent
from deployments.transports.channel import client_connection as client_module
from deployments.transports.channel import replica_connections as connections_module
from deployments.transports.channel.frames import Frame, FrameType
from deployments.transports.channel.replica_connections import (
    MAX_TRIES,
    NoChannel,
    ReplicaConnections,
)
from deployments.transports.channel.server import ServerConnection
from tests.support.channels import (
    NODE,
    call,
    connected_pool,
    pool_costs,
    running_replica,
    send,
    server_loads,
    until,
)
from tests.support.fakes import TIMEOUT_S
from tests.support.loop_clock import LoopClock


@pytest.mark.parametrize("node", [NODE, "another node"])
async def test_call_is_answered_over_unix_and_tcp(node: str) -> None:
    async with running_replica() as replica, connected_pool(replica, node=node) as pool:
        answer = await pool.call(call(b"echo 1"))
        assert (bytes(answer.message), answer.cost) == (b"echo 1", 6)
        (connection,) = replica.server.connections
        assert connection.family == (socket.AF_UNIX if node == NODE else socket.AF_INET)


async def test_large_and_small_messages_share_a_connection() -> None:
    large = b"echo" + bytes(27_000_000)
    async with running_replica() as replica, connected_pool(replica) as pool:
        answers = await asyncio.gather(
            send(pool, large), *(send(pool, b"echo %d" % n) for n in range(50))
        )
    assert answers[0] == large
    assert answers[1:] == [b"echo %d" % n for n in range(50)]


async def test_cancelled_call_is_cancelled_in_the_replica() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        task = asyncio.create_task(send(pool, b"wait"))
        await until(lambda: replica.replica.started)
        task.cancel()
        await until(lambda: replica.replica.cancelled)
        await until(lambda: server_loads(replica) == 0)
        assert pool_costs(pool) == 0
        assert await send(pool, b"echo") == b"echo"


async def test_call_that_is_cancelled_before_it_starts_leaves_no_load() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        task = asyncio.create_task(send(pool, b"wait"))
        await asyncio.sleep(0)
        task.cancel()
        assert await send(pool, b"echo") == b"echo"
        await until(lambda: server_loads(replica) == 0)


async def test_client_that_disconnects_cancels_its_calls() -> None:
    async with running_replica() as replica:
        async with connected_pool(replica) as pool:
            task = asyncio.create_task(send(pool, b"wait"))
            await until(lambda: replica.replica.started)
            connections = pool.connections()
            pool.close()
            for connection in connections:
                connection.abort()
            with pytest.raises(NoChannel):
                await task
        await until(lambda: replica.replica.cancelled == [b"wait"])


async def test_lost_replica_is_replaced_within_the_call() -> None:
    async with (
        running_replica() as first,
        running_replica() as second,
        connected_pool(first, second) as pool,
    ):
        tasks = [asyncio.create_task(send(pool, b"call %d" % n)) for n in range(6)]
        await until(lambda: len(first.replica.started) + len(second.replica.started) == 6)
        assert first.replica.started
        assert second.replica.started
        await first.kill()
        second.replica.release.set()
        assert await asyncio.gather(*tasks) == [b"call %d" % n for n in range(6)]


async def test_call_ends_only_so_many_replicas() -> None:
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(running_replica()) for _ in range(MAX_TRIES + 1)
        ]
        pool = await stack.enter_async_context(connected_pool(*replicas))
        task = asyncio.create_task(send(pool, b"poison"))
        for _ in range(MAX_TRIES):
            await until(lambda: any(one.replica.started for one in replicas))
            (victim,) = [one for one in replicas if one.replica.started]
            victim.replica.started.clear()
            victim.disconnect()
        with pytest.raises(ReplicasLost, match="3 replicas were lost"):
            await task


async def test_no_replica_raises_no_channel() -> None:
    pool = ReplicaConnections("CpuEncoder", NODE)
    with pytest.raises(NoChannel):
        await send(pool, b"echo")


async def test_disconnected_replica_is_connected_again() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        replica.disconnect()
        await until(lambda: pool.connected == 0)
        await until(lambda: pool.connected == 1)
        assert await send(pool, b"echo") == b"echo"


async def test_silent_replica_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CHECK_S", 0.02)
    monkeypatch.setattr(client_module, "PING_S", 0.05)
    monkeypatch.setattr(client_module, "LOST_S", 0.2)
    async with running_replica() as stopped, running_replica() as other:
        handle_frame, types = ServerConnection.handle_frame, []

        def hang(connection: ServerConnection, frame: Frame) -> None:
            if connection in stopped.server.connections:
                types.append(frame.type)
            else:
                handle_frame(connection, frame)

        async with connected_pool(stopped) as pool:
            monkeypatch.setattr(ServerConnection, "handle_frame", hang)
            task = asyncio.create_task(send(pool, b"echo"))
            await until(lambda: types)
            pool.update({"0": stopped.endpoint, "other": other.endpoint})
            assert await task == b"echo"
        assert FrameType.PING in types
        assert stopped.replica.started == []
        assert other.replica.started == [b"echo"]


async def test_call_to_lost_replicas_ends_unless_a_successor_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no fallback to the Serve handle while Serve lists the replica.

    The handle would send the call to the same replica.
    """
    async with (
        running_replica() as first,
        running_replica() as successor,
        connected_pool(first) as pool,
    ):
        waiting = asyncio.create_task(send(pool, b"wait"))
        await until(lambda: first.replica.started)
        first.stop_listening()
        first.disconnect()
        await until(lambda: pool.connected == 0)
        await asyncio.sleep(0)
        monkeypatch.setattr(connections_module, "SUCCESSOR_S", 0.05)
        with pytest.raises(ReplicasSilent, match="no replica of CpuEncoder answers"):
            await send(pool, b"echo")
        with pytest.raises(ReplicasSilent):
            await pool.call(call(b"echo")._replace(can_wait=False))
        successor.replica.release.set()
        pool.update({"0": first.endpoint, "successor": successor.endpoint})
        assert await waiting == b"wait"
        pool.update({})
        with pytest.raises(NoChannel):
            await send(pool, b"echo")


async def test_wait_for_a_successor_ends_although_replicas_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections_module, "SUCCESSOR_S", 0.1)
    async with running_replica() as replica, connected_pool(replica) as pool:
        replica.stop_listening()
        replica.disconnect()
        await until(lambda: pool.connected == 0)
        waiting = asyncio.create_task(send(pool, b"echo"))
        async with asyncio.timeout(TIMEOUT_S):
            while not waiting.done():
                pool.update({"0": replica.endpoint})  # wakes the waiting calls
                await asyncio.sleep(0.01)
        with pytest.raises(ReplicasSilent):
            await waiting


async def test_slow_replica_that_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock(monkeypatch)
    async with running_replica() as replica, connected_pool(replica) as pool:
        task = asyncio.create_task(send(pool, b"slow"))
        await until(lambda: replica.replica.started)
        for _ in range(int(3 * client_module.LOST_S / client_module.CHECK_S)):
            await clock.advance(client_module.CHECK_S)
            await asyncio.sleep(0.005)  # ping and answer
        assert not task.done()
        replica.replica.release.set()
        assert await task == b"slow"
        assert replica.replica.started == [b"slow"], "it is computed once"


async def test_credit_bounds_what_is_in_a_replica() -> None:
    async with running_replica(window=10) as replica, connected_pool(replica) as pool:
        tasks = [asyncio.create_task(send(pool, b"call", cost=4)) for _ in range(9)]
        await until(lambda: replica.server.calls == 3)
        await asyncio.sleep(0.02)
        assert (replica.server.calls, replica.server.load) == (3, 12)
        tasks[0].cancel()
        tasks[8].cancel()
        await until(lambda: len(replica.replica.started) == 4)
        replica.replica.release.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done.count(b"call") == 7
        assert (pool_costs(pool), server_loads(replica)) == (0, 0)


async def test_call_above_the_window_is_sent_alone() -> None:
    async with running_replica(window=10) as replica, connected_pool(replica) as pool:
        assert await send(pool, b"echo", cost=1_000) == b"echo"


async def test_window_is_divided_among_connections() -> None:
    async with (
        running_replica(window=10) as replica,
        connected_pool(replica) as first,
        connected_pool(replica) as second,
    ):
        assert await send(first, b"echo") == await send(second, b"echo") == b"echo"
        assert [c.window for c in (*first.connections(), *second.connections())] == [5, 5]


async def test_calls_go_to_the_replica_with_the_least_load() -> None:
    async with (
        running_replica() as first,
        running_replica() as second,
        connected_pool(first, second) as pool,
    ):
        long = asyncio.create_task(send(pool, b"long", cost=100))
        await until(lambda: server_loads(first, second) > 0)
        idle = second if first.server.calls else first
        for _ in range(5):
            await send(pool, b"echo", cost=10)
        assert idle.replica.started == [b"echo"] * 5
        idle.replica.release.set()
        long.cancel()


async def test_load_of_other_clients_counts() -> None:
    async with (
        running_replica() as first,
        running_replica() as second,
        connected_pool(first) as other,
        connected_pool(first, second) as pool,
    ):
        task = asyncio.create_task(send(other, b"long", cost=100))
        await until(lambda: first.server.calls == 1)
        messages = [await send(pool, b"echo %d" % n) for n in range(12)]
        assert len(messages) == 12
        # At most one call goes to `first`: its answer reports the load of the other client.
        assert len(second.replica.started) >= 11
        task.cancel()


async def test_load_of_other_clients_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_replica() as replica,
        connected_pool(replica) as other,
        connected_pool(replica) as pool,
    ):
        task = asyncio.create_task(send(other, b"long", cost=100))
        own = asyncio.create_task(send(pool, b"long", cost=3))
        await until(lambda: replica.server.calls == 2)
        await send(pool, b"echo")
        (connection,) = pool.connections()
        assert connection.cost_in_flight == 100 + 3, "the own call counts once"
        own.cancel()
        await until(lambda: replica.server.calls == 1)
        replica.replica.release.set()
        await task
        assert not pool.has_idle_replica("model"), "no later answer corrects the report"
        monkeypatch.setattr(client_module, "OTHER_LOAD_S", 0.0)
        assert pool.has_idle_replica("model")


async def test_draining_replica_answers_what_it_has() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        task = asyncio.create_task(send(pool, b"accepted"))
        await until(lambda: replica.replica.started)
        closing = asyncio.create_task(replica.server.close(10))
        await until(lambda: pool.connected == 0)
        with pytest.raises(NoChannel):
            await send(pool, b"echo")
        assert not closing.done()
        replica.replica.release.set()
        assert await task == b"accepted"
        await closing


async def test_drain_ends_after_its_timeout() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        task = asyncio.create_task(send(pool, b"hangs"))
        await until(lambda: replica.replica.started)
        await replica.server.close(0.05)
        with pytest.raises(NoChannel):
            await task


async def test_unlisted_replica_gets_no_new_calls_and_answers_the_old() -> None:
    async with running_replica() as old, running_replica() as new, connected_pool(old) as pool:
        task = asyncio.create_task(send(pool, b"accepted"))
        await until(lambda: old.replica.started)
        pool.update({"new": new.endpoint})
        await until(lambda: new.server.connections)
        await until(lambda: pool.connected == 1)
        assert await send(pool, b"echo") == b"echo"
        assert old.replica.started == [b"accepted"]
        old.replica.release.set()
        assert await task == b"accepted"
        await until(lambda: not old.server.connections)


async def test_replica_that_is_unlisted_during_the_handshake_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServerConnection, "handle_frame", lambda *_: None)
    async with running_replica() as replica:
        pool = ReplicaConnections("CpuEncoder", NODE)
        pool.update({"0": replica.endpoint})
        await until(pool.connections)
        (connection,) = pool.connections()
        pool.update({})
        await until(connection.closed.done)
        assert not connection.is_ready
