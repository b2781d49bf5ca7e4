"""Channel servers and pools in one event loop, with handlers that a test controls."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from deployments.errors import InvalidField
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.endpoint import Endpoint
from deployments.transports.channel.frames import ChannelError, Method
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ChannelServer, Reply, Service
from tests.support.fakes import PanicException

NODE = "node-1"


_FAULTS: Mapping[bytes, BaseException] = {
    b"fail": InvalidField("wrong", field="inputs"),
    b"bug": ZeroDivisionError(),
    b"undecodable": ChannelError("a map, expected an array"),
    b"panic": PanicException("index out of bounds"),
    b"cancelled": asyncio.CancelledError(),
}


@dataclass
class ScriptedReplica:
    """Replica that answers `b"echo ..."` at once, and raises the errors in `_FAULTS`.

    All other messages wait for `release`. A stream with the message `b"3"` yields three numbers,
    then waits for `release`.
    """

    release: asyncio.Event = field(default_factory=asyncio.Event)
    started: list[bytes] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)  # of the calls of `infer`
    cancelled: list[bytes] = field(default_factory=list)
    window: int = 1_000

    async def infer(self, message: memoryview, deadline_s: float) -> Reply:
        content = bytes(message)
        self.started.append(content)
        self.deadlines.append(deadline_s)
        if content in _FAULTS:
            raise _FAULTS[content]
        if not content.startswith(b"echo"):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.append(content)
                raise
        return Reply(content, cost=len(content))

    async def stream(self, message: memoryview, _deadline_s: float) -> AsyncGenerator[bytes, None]:
        content = bytes(message)
        self.started.append(content)
        try:
            for number in range(int(content)):
                yield str(number).encode()
            await self.release.wait()
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(content)
            raise

    def service(self) -> Service:
        return Service({Method.INFER: self.infer}, {Method.STREAM: self.stream}, self.window)


@dataclass
class RunningReplica:
    replica: ScriptedReplica
    server: ChannelServer
    endpoint: Endpoint

    def disconnect(self) -> None:
        """Break all connections, as a killed process does."""
        for connection in tuple(self.server.connections):
            connection.abort()

    def stop_listening(self) -> None:
        for server in self.server._servers:
            server.close()

    async def kill(self) -> None:
        await self.server.close(0)


@asynccontextmanager
async def running_replica(
    window: int = 1_000, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RunningReplica]:
    replica = ScriptedReplica(window=window)
    server = ChannelServer(replica.service(), tls)
    running = RunningReplica(replica, server, await server.start(NODE, "127.0.0.1"))
    try:
        yield running
    finally:
        await running.kill()


@asynccontextmanager
async def connected_pool(
    *replicas: RunningReplica, node: str = NODE, tls: ssl.SSLContext | None = None
) -> AsyncIterator[ReplicaConnections]:
    """Yield a pool that is connected to all replicas."""
    pool = ReplicaConnections("CpuEncoder", node, tls)
    pool.update({str(index): running.endpoint for index, running in enumerate(replicas)})
    await until(lambda: all(running.server.connections for running in replicas))
    await until(lambda: pool.connected == len(replicas))
    try:
        yield pool
    finally:
        pool.close()


def call(message: bytes, cost: int = 1, method: Method = Method.INFER) -> ChannelRequest:
    return ChannelRequest(method, message, cost, deadline_s=0.0)


async def until(condition: object) -> None:
    """Wait until `condition()` is true. Only the timeout of the test limits the wait."""
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.001)


async def send(pool: ReplicaConnections, message: bytes, cost: int = 1) -> bytes:
    return bytes((await pool.call(call(message, cost))).message)


def pool_costs(pool: ReplicaConnections) -> int:
    return sum(connection.pending_cost for connection in pool.connections())


def server_loads(*replicas: RunningReplica) -> int:
    return sum(running.server.load + running.server.calls for running in replicas)
