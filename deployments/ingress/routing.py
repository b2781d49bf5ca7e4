"""Micro-batches of calls before the first hop.

A hop between deployments costs the same for one call and for many, so concurrent calls share one.
Each BatchKey has one open micro-batch.
"""

from __future__ import annotations

import asyncio
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
    """Wrap `send` in @serve.batch, which works inside a Serve replica only.

    A call that finds nothing in flight is sent at once: collecting it takes @serve.batch 64 µs, and
    nothing could join it.
    """
    from ray import serve

    in_flight = 0

    async def send_micro_batch(calls: list[Call]) -> list[Outcome]:
        nonlocal in_flight
        in_flight += 1
        try:
            return await send(calls)
        finally:
            in_flight -= 1

    collect: Submit = serve.batch(
        max_batch_size=settings.max_batch_size,
        batch_wait_timeout_s=settings.batch_wait_timeout_s,
        max_concurrent_batches=settings.max_concurrent_batches,
    )(send_micro_batch)

    async def submit(call: Call) -> Outcome:
        if in_flight == 0 and settings.batch_wait_timeout_s == 0:
            (outcome,) = await send_micro_batch([call])
            return outcome
        return await collect(call)

    return submit
