"""Client end of one connection: calls, streams, and detection of lost replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import NamedTuple

from deployments.deadlines import remaining_s
from deployments.transports.channel.codec import decode_error
from deployments.transports.channel.connection import FrameConnection
from deployments.transports.channel.endpoint import (
    NONCE_BYTES,
    check_signature,
    encode_hello,
    sign,
)
from deployments.transports.channel.frames import (
    AnswerFrame,
    Buffer,
    ChannelError,
    Frame,
    FrameType,
    Method,
    decode_answer,
    decode_count,
    decode_models,
    encode_call,
    encode_count,
)

# Seconds without data from a replica with calls in progress. After PING_S the client pings, after
# LOST_S it drops the connection. It checks every CHECK_S seconds.
PING_S = 2.0
LOST_S = 5.0
CHECK_S = 1.0
# Seconds for which a replica's report of its load is valid. Each answer and each error carries a
# new report. An old report of a high load would keep calls away, and so prevent a new report.
OTHER_LOAD_S = 5.0
# Events of a stream that the client reads between two RENEW frames. Must be below the server's
# STREAM_WINDOW.
RENEW_EVENTS = 16


class ReplicaLost(Exception):
    """The connection ended before the answer. Another replica can run the call."""


class ChannelRequest(NamedTuple):
    """One call in encoded form, for any replica of a ReplicaConnections."""

    method: Method
    message: Buffer
    cost: int
    deadline_s: float = 0.0  # unused by methods without a deadline
    is_repeatable: bool = False  # whether a stream may start again after its first event
    can_wait: bool = True  # whether to wait for a new replica when all replicas are lost
    backlog: int = 0  # cost of the calls that wait in this process behind this call
    model: str = ""  # name of the exact version; replicas that have it loaded are preferred


class _Pending:
    """A call in progress. `end` resolves to its answer.

    `events` is set only for streams. It has the events, then None at the end. The answer of a
    stream is its last event, or empty.
    """

    def __init__(self, cost: int, end: asyncio.Future[AnswerFrame]) -> None:
        self.cost = cost
        self.end = end
        self.events: asyncio.Queue[Buffer | None] | None = None

    def finish(self, outcome: AnswerFrame | Exception) -> None:
        if self.end.done():  # cancelled by the caller
            return
        if isinstance(outcome, Exception):
            self.end.set_exception(outcome)
        else:
            self.end.set_result(outcome)
        if self.events is not None:
            if isinstance(outcome, AnswerFrame) and outcome.message:
                self.events.put_nowait(outcome.message)
            self.events.put_nowait(None)


class ClientConnection(FrameConnection):
    """A connection to one replica, with the replica's secret `key`.

    `on_change` is set when the connection may take another call, and when it is lost.
    """

    def __init__(self, key: bytes, on_change: asyncio.Event) -> None:
        super().__init__()
        self.is_draining = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._key = key
        self._on_change = on_change
        self._nonce = os.urandom(NONCE_BYTES)
        self._has_proved = False
        self._pending: dict[int, _Pending] = {}  # by frame id
        self._next_id = 1
        self.pending_cost = 0
        self.models: set[str] = set()  # names of the models that the replica has loaded
        self._other_load = 0
        self._other_load_s = 0.0  # loop time of the report of `_other_load`
        self.window = 0
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = 0.0  # loop time of the last check

    @property
    def cost_in_flight(self) -> int:
        """Cost of the calls in the replica, as far as this client knows.

        The calls of other clients count for OTHER_LOAD_S after the last report.
        """
        is_recent = self._loop.time() - self._other_load_s < OTHER_LOAD_S
        return self.pending_cost + (self._other_load if is_recent else 0)

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.is_draining and self._transport is not None

    @property
    def is_lost(self) -> bool:
        return self.is_ready and self._transport is None

    @property
    def has_credit(self) -> bool:
        """Whether one more call of any cost may be sent: window and write buffer are not full."""
        return self.pending_cost < self.window and self._writable.is_set()

    async def call(self, request: ChannelRequest) -> AnswerFrame:
        """Return the answer. Cancelling also cancels the call in the replica.

        Raises the ServeError that the replica sends, or ReplicaLost.
        """
        id, pending = self._send_call(request)
        try:
            return await pending.end
        finally:
            self._forget(id)

    async def stream(self, request: ChannelRequest) -> AsyncGenerator[Buffer, None]:
        """Yield the events. Closing cancels the call in the replica. Raises as `call` does."""
        id, pending = self._send_call(request)
        pending.events = asyncio.Queue()
        unrenewed = 0
        try:
            while (event := await pending.events.get()) is not None:
                yield event
                unrenewed += 1
                if unrenewed == RENEW_EVENTS:
                    self.send(FrameType.RENEW, id, encode_count(unrenewed))
                    unrenewed = 0
            await pending.end
        finally:
            self._forget(id)

    def drain(self) -> None:
        """Send no more calls, and close the connection after the last answer."""
        self.is_draining = True
        self._on_change.set()
        if not self._pending:
            self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(FrameType.HELLO, 0, encode_hello(self._nonce))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for pending in self._pending.values():
            pending.finish(ReplicaLost())
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        self._on_change.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._on_change.set()

    def handle_frame(self, frame: Frame) -> None:
        pending = self._pending.get(frame.id)  # None if the call was cancelled meanwhile
        if not self.is_ready:
            self._continue_handshake(frame)
        elif frame.type in (FrameType.ANSWER, FrameType.ERROR):
            answer = decode_answer(frame.body)
            self._other_load, self.window = answer.other_load, answer.window
            self._other_load_s = self._loop.time()
            if pending is not None:
                is_error = frame.type == FrameType.ERROR
                pending.finish(decode_error(answer.message) if is_error else answer)
        elif frame.type == FrameType.EVENT:
            if pending is not None and pending.events is not None:
                pending.events.put_nowait(frame.body)
        else:
            self._handle_news(frame)

    def _handle_news(self, frame: Frame) -> None:
        """Handle a frame that belongs to no call."""
        if frame.type == FrameType.MODELS:
            for name, is_loaded in decode_models(frame.body):
                (self.models.add if is_loaded else self.models.discard)(name)
        elif frame.type == FrameType.GOAWAY:
            self.drain()
        elif frame.type != FrameType.PONG:
            raise ChannelError(f"a frame of type {frame.type} from a replica")

    def _continue_handshake(self, frame: Frame) -> None:
        if frame.type == FrameType.CHALLENGE and not self._has_proved:
            nonces = self._nonce, frame.body[:NONCE_BYTES]
            check_signature(frame.body[NONCE_BYTES:], sign(self._key, "server", *nonces))
            self.send(FrameType.PROOF, 0, sign(self._key, "client", *nonces))
            self._has_proved = True
        elif frame.type == FrameType.READY and self._has_proved:
            self.window = decode_count(frame.body)
            self.finish_handshake()
            self._on_change.set()
        else:
            raise ChannelError(f"a frame of type {frame.type} in the handshake")

    def _send_call(self, request: ChannelRequest) -> tuple[int, _Pending]:
        if self._transport is None:
            raise ReplicaLost
        if not self._pending:
            self._received_s = self._loop.time()
        id, pending = self._next_id, _Pending(request.cost, self._loop.create_future())
        self._next_id += 1
        self._pending[id] = pending
        self.pending_cost += request.cost
        header = encode_call(
            request.method, remaining_s(request.deadline_s), request.cost, request.backlog
        )
        self.send(FrameType.CALL, id, header, request.message)
        if self._timer is None:
            self._schedule_check()
        return id, pending

    def _forget(self, id: int) -> None:
        """Remove a call and its cost; cancel the call in the replica if it has not ended."""
        pending = self._pending.pop(id)
        self.pending_cost -= pending.cost
        if not pending.end.done() or pending.end.cancelled():
            self.send(FrameType.CANCEL, id)
        else:
            # Mark the exception as retrieved: a stream that is closed early never awaits it.
            pending.end.exception()
        self._on_change.set()
        if self.is_draining and not self._pending:
            self.close()

    def _schedule_check(self) -> None:
        self._checked_s = self._loop.time()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        """Ping a silent replica; drop the connection if it stays silent."""
        self._timer = None
        if not self._pending:
            return
        now_s = self._loop.time()
        if now_s - self._checked_s > 2 * CHECK_S:  # this process was stalled and read nothing
            self._received_s = now_s
        silent_s = now_s - self._received_s
        if silent_s > LOST_S:
            self.abort()
            return
        if silent_s > PING_S:
            self.send(FrameType.PING)
        self._schedule_check()
