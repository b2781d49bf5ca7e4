"""Collection of calls with @serve.batch, behind slots that share it between clients."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import Context
from functools import partial
from typing import Any

from deployments.ingress.micro_batches import GetSettings, PendingCall, SendMicroBatch, SubmitCall
from deployments.messages import Sender


def serve_micro_batches(send: SendMicroBatch, get_settings: GetSettings) -> SubmitCall:
    """Collect calls with @serve.batch, which works only inside a Serve replica."""
    from ray import serve

    slots = BatchSlots(send, get_settings)
    applied = get_settings()

    async def start(calls: list[PendingCall]) -> list[None]:
        return await slots.start(calls)

    # @serve.batch looks up the signature in every call, which takes 26 µs for a method. A function
    # with `__signature__` avoids this.
    vars(start)["__signature__"] = inspect.signature(start)
    collect: Any = serve.batch(
        max_batch_size=applied.max_batch_size, batch_wait_timeout_s=applied.batch_wait_timeout_s
    )(start)

    async def collect_any(call: PendingCall) -> None:
        # A new function for new settings would leave the former one's task, which waits for ever.
        nonlocal applied
        if (settings := get_settings()) is not applied:
            applied = settings
            collect.set_max_batch_size(settings.max_batch_size)
            collect.set_batch_wait_timeout_s(settings.batch_wait_timeout_s)
        # @serve.batch splits batches by the multiplexed model id, which clients can set in a
        # header. In an empty context it sees no such id.
        if serve.get_multiplexed_model_id():
            await asyncio.create_task(collect(call), context=Context())
        else:
            await collect(call)

    return partial(slots.submit, collect_any)


class BatchSlots:
    """Queue in front of @serve.batch, with `max_concurrent_batches` slots per sender.

    A sender is a client with one priority. Until a micro-batch is answered, it takes one slot of
    each sender of its calls. A client therefore does not wait for the slots of another client. An
    interactive call does not wait for the slots of a batch job.

    @serve.batch forms a batch before it waits for a slot. Calls that arrive one by one while all
    slots of their sender are taken would become batches of one call. They wait in this queue
    instead, and enter @serve.batch together when a slot is free. Once a whole micro-batch of calls
    of one sender waits, these calls enter without a free slot. They then wait in the replicas,
    whose queues are fair.

    If `batch_wait_timeout_s` is 0 and no sender has taken a slot, a call is sent at once. No other
    call could join its micro-batch, and @serve.batch would take 64 µs.
    """

    def __init__(self, send: SendMicroBatch, get_settings: GetSettings) -> None:
        self._send = send
        self._get_settings = get_settings
        self._taken: Counter[Sender] = Counter()  # number of taken slots
        self._waiting: defaultdict[Sender, list[asyncio.Future[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, calls: list[PendingCall]) -> list[None]:
        """Start to send one micro-batch and return at once.

        @serve.batch delivers all results of a batch together. If this function awaited them, each
        call would wait for the last call of its batch. `_send` sets the outcome of each call.
        """
        senders = self._take_slots(calls)
        task = asyncio.get_running_loop().create_task(self._run(calls, senders))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [None] * len(calls)

    async def submit(self, collect: SubmitCall, call: PendingCall) -> None:
        """Send one call, alone or through `collect`, which joins it with other calls."""
        settings = self._get_settings()
        if not self._taken and settings.batch_wait_timeout_s == 0:
            await self._run([call], self._take_slots([call]))
            return
        sender = call.sender
        if self._taken[sender] >= settings.max_concurrent_batches:
            entered = asyncio.get_running_loop().create_future()
            waiting = self._waiting[sender]
            waiting.append(entered)
            if len(waiting) >= settings.max_batch_size:
                self._admit(sender)
            try:
                await entered
            except asyncio.CancelledError:
                if not entered.cancelled():  # admitted, but the caller left: admit the next calls
                    self._admit(sender)
                raise
        await collect(call)

    def _take_slots(self, calls: Sequence[PendingCall]) -> frozenset[Sender]:
        """Take a slot for each sender of a micro-batch, and return the senders."""
        senders = frozenset(pending.sender for pending in calls)
        self._taken.update(senders)
        return senders

    async def _run(self, calls: list[PendingCall], senders: frozenset[Sender]) -> None:
        """Send a micro-batch, then free the slots of its senders."""
        try:
            await self._send(calls)
        finally:
            for sender in senders:
                self._taken[sender] -= 1
                if not self._taken[sender]:
                    del self._taken[sender]
                self._admit(sender)

    def _admit(self, sender: Sender) -> None:
        """Admit the waiting calls of a sender, which are at most one micro-batch (see `submit`)."""
        for entered in self._waiting.pop(sender, ()):
            if not entered.done():  # done: cancelled together with its caller
                entered.set_result(None)
