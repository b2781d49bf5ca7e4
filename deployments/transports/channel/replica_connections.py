"""Connections to all replicas of one deployment; chooses a replica per call, and retries."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import NamedTuple
from zlib import crc32

from deployments.errors import (
    EngineFailed,
    Overloaded,
    ReplicasLost,
    ReplicasSilent,
    ServeError,
    forget_frames,
)
from deployments.transports.channel.client_connection import (
    ChannelRequest,
    ClientConnection,
    ReplicaLost,
)
from deployments.transports.channel.endpoint import HANDSHAKE_TIMEOUT_S, Endpoint
from deployments.transports.channel.frames import AnswerFrame, Buffer

log = logging.getLogger("ray.serve.hundredfold")

# Up to this number of replicas, a call compares the load of all. With more, it compares two random
# replicas.
MAX_COMPARED = 4
# Maximum number of replicas on which a call is tried: three, because two replicas can fail at the
# same time by chance. The limit keeps a call that crashes its replica from crashing all.
MAX_TRIES = 3
# Maximum number of replicas that may refuse a call as Overloaded. The second try prefers the least
# loaded of the other replicas. If that replica is full too, further tries would rarely succeed.
MAX_REFUSALS = 2
# Seconds between attempts to connect. Each failure doubles the time, up to MAX_BACKOFF_S.
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


# Seconds that a call waits for a new replica while Serve lists only lost replicas. A Serve handle
# is no alternative: it would send the call to a lost replica. Together with LOST_S and CHECK_S of
# client_connection.py, the callers of a stopped replica wait up to 10 s.
SUCCESSOR_S = 4.0


class NoChannel(Exception):
    """No replica is connected; use the Ray Serve handle."""


class Peer:
    """One replica, and the task that keeps a connection to it. `connect` may raise OSError."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        connect: Callable[[Endpoint], Awaitable[ClientConnection]],
    ) -> None:
        self.endpoint = endpoint
        self.connection: ClientConnection | None = None
        self._name = name
        self._connect = connect
        self._was_lost = False  # whether a connection was ever lost after its handshake
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())

    @property
    def may_return(self) -> bool:
        """Whether a connection was ever lost after its handshake, and the replica does not drain.

        Such a replica is connected again, or Serve replaces it.
        """
        connection = self.connection
        if connection is None or connection.is_draining:
            return False
        return self._was_lost or connection.is_lost

    def retire(self) -> None:
        """Stop connecting; close the connection after its last answer."""
        self._task.cancel()
        if self.connection is not None:
            self.connection.drain()

    async def _stay_connected(self) -> None:
        """Reconnect until the replica drains or is retired."""
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                self.connection = await self._connect(self.endpoint)
            except OSError as error:
                log.info("channel to %s: %s", self._name, error)
            else:
                await self.connection.closed
                self._was_lost |= self.connection.is_ready
                if self.connection.is_draining:
                    return
                if self.connection.is_ready:
                    backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


class _Option(NamedTuple):
    """A replica that may take a call."""

    connection: ClientConnection
    is_local: bool
    replica: str


class _Tries:
    """Number of failed tries of one request, and the replicas that refused the request."""

    def __init__(self, name: str) -> None:
        self.refused: set[ClientConnection] = set()
        self._name = name
        self._count = 0
        self._full = 0  # refusals by full replicas
        self._refusal: ServeError | None = None  # the last one

    def note_lost(self, error: ReplicaLost) -> None:
        """Count a lost replica. After MAX_TRIES losses and refusals, raise the last refusal.

        Raises ReplicasLost if there was no refusal.
        """
        forget_frames(error)
        log.warning("%s: a replica was lost during a call", self._name)
        self._count += 1
        if self._count >= MAX_TRIES:
            raise self._refusal or ReplicasLost(
                f"{MAX_TRIES} replicas were lost during this request; retry later"
            )

    def note_refused(
        self,
        connection: ClientConnection,
        error: ServeError,
        connections: Iterable[ClientConnection],
    ) -> None:
        """Count a refusal. Raises `error` if no other replica may answer.

        That is the case if `error.elsewhere` is false, or if all usable `connections` have refused
        the request. Also raises `error` after MAX_TRIES, and after MAX_REFUSALS of full replicas.
        """
        forget_frames(error)
        self.refused.add(connection)
        self._refusal = error
        self._count += 1
        is_full = isinstance(error, Overloaded)
        self._full += is_full
        # After a refusal by a full replica, replicas without credit do not count. Under overload,
        # an error at once is better than a wait for credit.
        has_other = any(
            one.is_usable and one not in self.refused and (one.has_credit or not is_full)
            for one in connections
        )
        is_last = self._count >= MAX_TRIES or self._full >= MAX_REFUSALS
        if not error.elsewhere or is_last or not has_other:
            raise error


class ReplicaConnections:
    """Connections from a process on `node` to the replicas of one deployment."""

    def __init__(
        self, name: str, node: str, tls: ssl.SSLContext | None = None, spread: int = 0
    ) -> None:
        """See `_choose_free` for `spread`, a difference between the loads of two replicas."""
        self._spread = spread
        self._name = name
        self._node = node
        self._tls = tls
        self._peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()
        self._waiting_cost = 0  # cost of the requests that wait for credit

    def update(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Connect to new replicas in `endpoints`; send no more calls to replicas not in it."""
        for replica, endpoint in endpoints.items():
            if replica not in self._peers:
                name = f"{self._name} {replica}"
                self._peers[replica] = Peer(name, endpoint, self._connect)
        for replica in self._peers.keys() - endpoints.keys():
            self._peers.pop(replica).retire()
        self._changed.set()

    def close(self) -> None:
        self.update({})

    @property
    def connected(self) -> int:
        """The number of replicas that take calls."""
        return sum(connection.is_usable for connection in self.connections())

    def has_idle_replica(self, model: str) -> bool:
        """Return whether a replica with the model is idle; if none has it, whether any is idle."""
        usable = [one for one in self.connections() if one.is_usable]
        holders = [one for one in usable if model in one.models]
        return any(one.cost_in_flight == 0 for one in holders or usable)

    def connections(self) -> list[ClientConnection]:
        """Return the connections to the listed replicas, including draining replicas."""
        peers = self._peers.values()
        return [peer.connection for peer in peers if peer.connection is not None]

    async def call(self, request: ChannelRequest) -> AnswerFrame:
        """Return the answer; if the replica is lost, try another replica.

        Raises the replica's ServeError, or ReplicasLost after MAX_TRIES. If no replica is usable,
        raises ReplicasSilent if a lost replica may return, else NoChannel. A refusal counts as one
        try if another replica may answer (`ServeError.elsewhere`).
        """
        tries = _Tries(self._name)
        while True:
            connection, backlog = await self._choose(request, tries.refused)
            try:
                return await connection.call(request._replace(backlog=backlog))
            except ReplicaLost as error:
                tries.note_lost(error)
            except ServeError as error:
                tries.note_refused(connection, error, self.connections())

    async def call_each(self, request: ChannelRequest) -> dict[str, AnswerFrame | ServeError]:
        """Return the answers and errors by replica id, of all replicas that answer."""
        usable = {
            replica: peer.connection
            for replica, peer in self._peers.items()
            if peer.connection is not None and peer.connection.is_usable
        }
        calls = (connection.call(request) for connection in usable.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, AnswerFrame | ServeError] = {}
        for replica, answer in zip(usable, answers, strict=True):
            if isinstance(answer, AnswerFrame | ServeError):
                found[replica] = answer
            elif not isinstance(answer, ReplicaLost):
                raise answer
        return found

    async def stream(self, request: ChannelRequest) -> AsyncGenerator[Buffer, None]:
        """Yield the events. If a replica is lost before the first event, try another; see `call`.

        If a replica is lost after the first event, a repeatable stream starts again on another
        replica and may repeat events. Any other stream raises EngineFailed.
        """
        tries = _Tries(self._name)
        while True:
            has_started = False
            connection, backlog = await self._choose(request, tries.refused)
            try:
                async with aclosing(connection.stream(request._replace(backlog=backlog))) as events:
                    async for event in events:
                        has_started = True
                        yield event
                return
            except ReplicaLost as error:
                if has_started and not request.is_repeatable:
                    raise EngineFailed("the replica was lost during this request") from None
                tries.note_lost(error)
            except ServeError as error:
                if has_started:
                    raise
                tries.note_refused(connection, error, self.connections())

    async def _choose(
        self, request: ChannelRequest, refused: Collection[ClientConnection]
    ) -> tuple[ClientConnection, int]:
        """Wait for a connection with credit for a call; return the one `_choose_free` prefers.

        Also return one replica's share of the cost that waits in this process. The connections in
        `refused` have refused the request. They are used only if there are no others. Raises
        ReplicasSilent or NoChannel as `call` does.
        """
        ends_s: float | None = None  # loop time until which the call waits for a successor
        while True:
            every = [
                _Option(peer.connection, peer.endpoint.node == self._node, replica)
                for replica, peer in self._peers.items()
                if peer.connection is not None and peer.connection.is_usable
            ]
            usable = [one for one in every if one.connection not in refused] or every
            if not usable:
                if ends_s is None:
                    wait_s = SUCCESSOR_S if request.can_wait else 0.0
                    ends_s = asyncio.get_running_loop().time() + wait_s
                await self._wait_for_successor(ends_s)
                continue
            ends_s = None
            free = [one for one in usable if one.connection.has_credit]
            if free:
                chosen = self._choose_free(free, request.model)
                return chosen, (request.backlog + self._waiting_cost) // len(usable)
            self._waiting_cost += request.cost
            try:
                self._changed.clear()
                await self._changed.wait()
            finally:
                self._waiting_cost -= request.cost

    def _choose_free(self, free: list[_Option], model: str) -> ClientConnection:
        """Prefer replicas that have the model and at most `spread` more load than the lowest load.

        If there are none, one more replica loads the model. A hash of model and replica selects it,
        so that all ingress replicas choose the same replica. Of the preferred replicas, take the
        least loaded one, on this node if loads are equal.
        """
        if model and len(free) > 1:
            least = min(one.connection.cost_in_flight for one in free)
            near = [one for one in free if one.connection.cost_in_flight <= least + self._spread]
            free = [one for one in near if model in one.connection.models] or [
                max(near, key=lambda one: crc32(f"{model} {one.replica}".encode()))
            ]
        if len(free) > MAX_COMPARED:
            free = random.sample(free, 2)
        return min(
            free, key=lambda one: (one.connection.cost_in_flight, not one.is_local)
        ).connection

    async def _wait_for_successor(self, ends_s: float) -> None:
        """Wait for a new replica or connection, because no listed replica is usable.

        Raises ReplicasSilent at the loop time `ends_s`, or NoChannel at once if no listed replica
        may return.
        """
        if not any(peer.may_return for peer in self._peers.values()):
            raise NoChannel
        self._changed.clear()
        try:
            async with asyncio.timeout_at(ends_s):
                await self._changed.wait()
        except TimeoutError:
            raise ReplicasSilent(
                f"no replica of {self._name} answers; it is replaced within seconds, retry later"
            ) from None

    async def _connect(self, endpoint: Endpoint) -> ClientConnection:
        """Connect by Unix socket on the same node, else by TCP. Raises OSError on failure."""
        loop = asyncio.get_running_loop()

        def build() -> ClientConnection:
            return ClientConnection(endpoint.key, self._changed)

        if endpoint.unix and endpoint.node == self._node:
            try:
                _, connection = await loop.create_unix_connection(build, endpoint.unix)
                return connection
            except OSError as error:
                log.info("%s: %s; trying TCP", self._name, error)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _, connection = await loop.create_connection(
                build, endpoint.host, endpoint.port, ssl=self._tls
            )
        return connection
