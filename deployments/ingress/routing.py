"""Micro-batches of calls before the first hop.

A hop between deployments costs the same for one call and for many, so concurrent calls share one.
Each BatchKey has one open micro-batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from deployments.artifacts.types import Device
from deployments.config import MicroBatchSettings
from deployments.deadlines import enforce_deadline
from deployments.errors import DeadlineExceeded, ServeError
from deployments.messages import BatchKey, Call, CallBatch, CallResult, Outcome
from deployments.transports.base import EncoderClient

SendMicroBatch = Callable[[list[Call]], Awaitable[list[Outcome]]]
Submit = Callable[[Call], Awaitable[Outcome]]
MicroBatcher = Callable[[SendMicroBatch, MicroBatchSettings], Submit]


@dataclass(slots=True)
class _Sent:
    """A micro-batch on its way: the callers that still wait, and the time limit that ends it."""

    callers: int
    timeout: asyncio.Timeout


class MicroBatchRouter:
    """Owns the open micro-batches of one ingress replica."""

    def __init__(
        self,
        clients: Mapping[Device, EncoderClient],
        batcher: MicroBatcher,
        settings: MicroBatchSettings,
    ) -> None:
        self._clients = clients
        self._batcher = batcher
        self._settings = settings
        self._submitters: dict[BatchKey, Submit] = {}
        self._sent: dict[int, _Sent] = {}  # by id() of each call

    def configure(self, settings: MicroBatchSettings) -> None:
        """Apply other settings to new calls; open micro-batches finish with the former ones."""
        if settings != self._settings:
            self._settings = settings
            self._submitters = {}

    async def run(self, key: BatchKey, call: Call) -> CallResult:
        """Return the call's result. Raises its ServeError; DeadlineExceeded after its deadline."""
        submit = self._submitters.get(key)
        if submit is None:
            submit = self._batcher(partial(self._send, key), self._settings)
            self._submitters[key] = submit
        try:
            async with enforce_deadline(call.deadline_s, "the request exceeded its deadline"):
                outcome = await submit(call)
        except (asyncio.CancelledError, DeadlineExceeded):
            self._abandon(call)
            raise
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    def _abandon(self, call: Call) -> None:
        """End the micro-batch of a call whose caller left, if it was the last caller."""
        sent = self._sent.get(id(call))
        if sent is not None:
            sent.callers -= 1
            if sent.callers == 0 and not sent.timeout.expired():
                sent.timeout.reschedule(asyncio.get_running_loop().time())

    async def _send(self, key: BatchKey, calls: list[Call]) -> list[Outcome]:
        """Send one micro-batch; if the hop fails, each call gets its error."""
        # No caller waits longer than the last deadline. Without this bound an encoder that never
        # starts would hold micro-batches whose callers are gone.
        deadline_s = max(call.deadline_s for call in calls)
        try:
            async with enforce_deadline(deadline_s, "the encoder exceeded the deadline") as timeout:
                self._sent |= dict.fromkeys(map(id, calls), _Sent(len(calls), timeout))
                return await self._clients[key.device].infer(CallBatch(key, tuple(calls)))
        except ServeError as error:
            return [error] * len(calls)
        finally:
            for call in calls:
                self._sent.pop(id(call), None)


def serve_micro_batches(send: SendMicroBatch, settings: MicroBatchSettings) -> Submit:
    """Wrap `send` in @serve.batch, which works inside a Serve replica only."""
    from ray import serve

    slots = BatchSlots(send, settings)
    collect: Submit = serve.batch(
        max_batch_size=settings.max_batch_size,
        batch_wait_timeout_s=settings.batch_wait_timeout_s,
        max_concurrent_batches=settings.max_concurrent_batches,
    )(slots.send)
    return partial(slots.submit, collect)


class BatchSlots:
    """Decides when calls enter @serve.batch; it has `max_concurrent_batches` slots.

    @serve.batch forms a batch before it waits for a slot. Calls that arrive one by one while all
    slots are taken would become batches of one call, sent one after the other. They wait here
    instead, and enter together when a slot is free.

    A call that finds all slots free is sent at once: collecting it takes @serve.batch 64 µs, and
    nothing could join it.
    """

    def __init__(self, send: SendMicroBatch, settings: MicroBatchSettings) -> None:
        self._send = send
        self._settings = settings
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def send(self, calls: list[Call]) -> list[Outcome]:
        """Send one micro-batch in a slot."""
        self._taken += 1
        try:
            return await self._send(calls)
        finally:
            self._taken -= 1
            self._admit()

    async def submit(self, collect: Submit, call: Call) -> Outcome:
        """Return the outcome of one call, sent alone or by way of `collect`."""
        if self._taken == 0 and self._settings.batch_wait_timeout_s == 0:
            (outcome,) = await self.send([call])
            return outcome
        if self._taken >= self._settings.max_concurrent_batches:
            entered = asyncio.get_running_loop().create_future()
            self._waiting.append(entered)
            try:
                await entered
            except asyncio.CancelledError:
                if (
                    not entered.cancelled()
                ):  # admitted, but its caller has left: the next ones enter
                    self._admit()
                raise
        return await collect(call)

    def _admit(self) -> None:
        """Let as many waiting calls enter as one micro-batch holds."""
        admitted = 0
        while self._waiting and admitted < self._settings.max_batch_size:
            entered = self._waiting.popleft()
            if not entered.done():  # else cancelled with its caller
                entered.set_result(None)
                admitted += 1
