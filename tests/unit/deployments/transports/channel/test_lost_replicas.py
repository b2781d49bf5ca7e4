"""Detection of lost replicas, and the attempts to connect to them again."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.errors import EngineFailed, ReplicasSilent
from deployments.transports.channel import replica_connections as connections_module
from deployments.transports.channel.client_connection import CHECK_S, LOST_S
from deployments.transports.channel.connection import (
    KEEPALIVE_S,
    TCP_USER_TIMEOUT_MS,
    FrameConnection,
)
from deployments.transports.channel.endpoint import Endpoint
from deployments.transports.channel.frames import WIRE_VERSION, FrameType
from deployments.transports.channel.replica_connections import MAX_BACKOFF_S, MIN_BACKOFF_S, Peer
from deployments.transports.channel.server import ServerConnection
from tests.support.channels import NODE, call, connected_pool, running_replica, send, until
from tests.support.loop_clock import LoopClock


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    return LoopClock(monkeypatch)


async def test_first_call_after_an_idle_time_is_not_taken_for_lost(clock: LoopClock) -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        assert await send(pool, b"echo") == b"echo"
        await clock.advance(CHECK_S)
        await clock.advance(10 * LOST_S)
        slow = asyncio.create_task(send(pool, b"slow"))
        await until(lambda: b"slow" in replica.replica.started)
        await clock.advance(CHECK_S)
        replica.replica.release.set()
        assert await slow == b"slow"
        assert replica.replica.started == [b"echo", b"slow"], "it is computed once"


async def test_ingress_that_did_not_run_keeps_its_calls(clock: LoopClock) -> None:
    """After the pause, answers that arrived meanwhile are still unread."""
    async with running_replica() as replica, connected_pool(replica) as pool:
        slow = asyncio.create_task(send(pool, b"slow"))
        await until(lambda: replica.replica.started)
        await clock.advance(2 * LOST_S)
        replica.replica.release.set()
        assert await slow == b"slow"
        assert replica.replica.started == [b"slow"], "it is computed once"


async def test_lost_replica_that_accepts_without_a_handshake_may_return(
    clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a hung replica. A Serve handle would send it the call."""
    async with running_replica() as replica, connected_pool(replica) as pool:
        (lost,) = pool.connections()
        monkeypatch.setattr(ServerConnection, "handle_frame", lambda *_: None)
        replica.disconnect()
        await until(lambda: pool.connected == 0)
        await clock.advance(0)
        await clock.advance(MIN_BACKOFF_S)
        await until(lambda: pool.connections() != [lost])
        with pytest.raises(ReplicasSilent):
            await pool.call(call(b"echo")._replace(can_wait=False))


async def test_pauses_between_attempts_to_connect_grow_until_a_connection_was_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep, ended = asyncio.sleep, asyncio.Event()
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    closed.set_result(None)
    ready = SimpleNamespace(closed=closed, is_ready=True, is_draining=False, drain=lambda: None)
    attempts = iter([*[OSError("refused")] * 8, ready, OSError("refused")])

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def connect(_endpoint: Endpoint) -> Any:
        attempt = next(attempts, None)
        if attempt is None:
            ended.set()
            await asyncio.Event().wait()
        if isinstance(attempt, OSError):
            raise attempt
        return attempt

    monkeypatch.setattr(connections_module.random, "uniform", lambda _least, most: most)
    monkeypatch.setattr(asyncio, "sleep", pause)
    peer = Peer("encoder", Endpoint(WIRE_VERSION, NODE, "", "127.0.0.1", 1, ""), connect)
    await ended.wait()
    peer.retire()
    doubled = [MIN_BACKOFF_S * 2**failures for failures in range(8)]
    first = [min(pause_s, MAX_BACKOFF_S) for pause_s in doubled]
    assert pauses == pytest.approx([*first, MIN_BACKOFF_S, 2 * MIN_BACKOFF_S])


async def test_replica_that_is_not_connected_yet_is_left_out_of_calls_to_each() -> None:
    async with running_replica() as replica, connected_pool(replica) as pool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            new = replica.endpoint._replace(unix="", port=port)
            pool.update({"0": replica.endpoint, "new": new})
            answers = await pool.call_each(call(b"echo"))
    assert list(answers) == ["0"]


async def test_replica_that_leaves_is_not_idle() -> None:
    """Else lone calls would skip the tokenizers for an encoder that is busy."""
    async with (
        running_replica() as busy,
        running_replica() as leaving,
        connected_pool(busy, leaving) as pool,
    ):
        task = asyncio.create_task(send(pool, b"long"))
        await until(lambda: busy.replica.started)
        assert pool.has_idle_replica("model")
        await leaving.server.close(0)
        await until(lambda: pool.connected == 1)
        assert not pool.has_idle_replica("model")
        busy.replica.release.set()
        await task


async def test_replica_that_does_not_listen_any_more_is_not_healthy() -> None:
    async with running_replica() as replica:
        replica.server.check_health()
        replica.stop_listening()
        with pytest.raises(EngineFailed, match="does not listen"):
            replica.server.check_health()
        await replica.kill()
        replica.server.check_health()  # a replica that stops is not replaced


async def test_frame_for_a_closing_connection_is_dropped() -> None:
    """A connection closes at the end of the replica's data, and is lost one step later."""
    async with running_replica() as replica, connected_pool(replica) as pool:
        (connection,) = pool.connections()
        connection.close()
        connection.send(FrameType.PING)
        await until(lambda: pool.connected == 0)
        await until(lambda: pool.connected == 1)
        assert await send(pool, b"echo") == b"echo"


async def test_kernel_ends_a_tcp_connection_to_a_lost_host() -> None:
    with socket.socket() as sock:
        transport: Any = SimpleNamespace(get_extra_info=lambda _name: sock)
        connection = FrameConnection()
        connection.connection_made(transport)
        connection.connection_lost(None)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        expected = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: KEEPALIVE_S,
            socket.TCP_KEEPINTVL: KEEPALIVE_S,
            socket.TCP_USER_TIMEOUT: TCP_USER_TIMEOUT_MS,
        }
        found = {option: sock.getsockopt(socket.IPPROTO_TCP, option) for option in expected}
        assert found == expected
