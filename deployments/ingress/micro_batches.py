"""Micro-batches: groups of calls that the ingress sends to an encoder deployment in one hop.

A hop between deployments costs the same for one call and for many, so concurrent short calls share
a hop. Short calls with an equal BatchKey (model, task, device) share a micro-batch. A long call is
sent alone, because other calls in its micro-batch would wait until it is tokenized.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from deployments.artifacts.types import Device
from deployments.config import MicroBatchSettings
from deployments.deadlines import enforce_deadline
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    ReplicasLost,
    ServeError,
    forget_frames,
)
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallOutcome,
    CallResult,
    ModelRef,
    Sender,
    count_characters,
)
from deployments.transports.base import EncoderClient

MAX_KEYS = 1_000  # maximum number of cached submit functions, one per BatchKey

SendMicroBatch = Callable[[list["PendingCall"]], Awaitable[None]]
Submit = Callable[["PendingCall"], Awaitable[None]]
GetSettings = Callable[[], MicroBatchSettings]  # each call returns the present settings
MicroBatcher = Callable[[SendMicroBatch, GetSettings], Submit]


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call whose caller waits for `outcome`."""

    call: Call
    outcome: asyncio.Future[CallOutcome]
    sent: _Sent | None = None
    characters: int = 0  # characters of the call while it waits; 0 once it is sent

    @property
    def sender(self) -> Sender:
        return self.call.client, self.call.priority

    def settle(self, outcome: CallOutcome | Exception) -> None:
        """Set the outcome, unless it is set or the caller left.

        A ServeError becomes the future's result. Any other exception is raised in the caller.
        """
        if self.outcome.done():
            return
        if isinstance(outcome, Exception) and not isinstance(outcome, ServeError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def abandon(self) -> None:
        """Cancel the outcome. End a sent micro-batch once no caller waits for any of its calls."""
        self.outcome.cancel()
        sent = self.sent
        if sent is None or sent.timeout.expired():
            return
        if all(one.outcome.done() for one in sent.calls):
            sent.timeout.reschedule(asyncio.get_running_loop().time())


class _Sent(NamedTuple):
    """A micro-batch that was sent and has no answer yet, and the timeout that can end it."""

    calls: Sequence[PendingCall]
    timeout: asyncio.Timeout


class MicroBatchRouter:
    """Router that collects calls of one ingress replica into micro-batches for the encoders."""

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
        self._waiting = dict.fromkeys(clients, 0)  # characters of unsent calls, by device

    def configure(self, settings: MicroBatchSettings) -> None:
        """Apply new settings to new calls. Micro-batches being collected keep the former ones."""
        if settings != self._settings:
            self._settings = settings

    async def run(self, key: BatchKey, call: Call) -> CallResult:
        """Return the result of a call. Raises ServeError; DeadlineExceeded after the deadline."""
        pending = PendingCall(call, asyncio.get_running_loop().create_future())
        pending.characters = sum(map(count_characters, call.texts))
        self._waiting[key.device] += pending.characters
        try:
            async with enforce_deadline(call.deadline_s, "the request exceeded its deadline"):
                if key.long:
                    await self._send(key, [pending])
                else:
                    await self._find_submitter(key)(pending)
                outcome = await pending.outcome
        except (asyncio.CancelledError, DeadlineExceeded):
            pending.abandon()
            raise
        finally:
            self._stop_waiting(key.device, pending)
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def load(self, model: ModelRef, device: Device) -> None:
        """Send an empty micro-batch, so that a replica loads a model. Raises ServeError."""
        key = BatchKey(model, task="", device=device, long=False)
        await self._clients[device].infer(CallBatch(key, ()), lambda _index, _outcome: None)

    def _find_submitter(self, key: BatchKey) -> Submit:
        submit = self._submitters.get(key)
        if submit is None:
            if len(self._submitters) >= MAX_KEYS:  # safe: waiting calls keep their submit function
                self._submitters = {}
            submit = self._batcher(partial(self._send, key), lambda: self._settings)
            self._submitters[key] = submit
        return submit

    async def _send(self, key: BatchKey, calls: list[PendingCall]) -> None:
        """Send one micro-batch. If the hop fails, calls without an outcome get the hop's error.

        Calls whose callers left while the micro-batch was collected are not sent. If replicas are
        lost, the unanswered calls of a micro-batch with several calls are sent again, one by one.
        """
        calls = [pending for pending in calls if not pending.outcome.done()]
        if not calls:
            return
        # No caller waits longer than the latest deadline. Without this limit, a micro-batch
        # for an encoder that never starts would stay in memory after its callers have left.
        deadline_s = max(pending.call.deadline_s for pending in calls)
        for pending in calls:
            self._stop_waiting(key.device, pending)
        batch = CallBatch(key, tuple(pending.call for pending in calls), self._waiting[key.device])

        def deliver(index: int, outcome: CallOutcome) -> None:
            calls[index].settle(outcome)

        error: Exception = EngineFailed("bug: the encoder ended without an outcome of this call")
        try:
            async with enforce_deadline(deadline_s, "the encoder exceeded the deadline") as timeout:
                sent = _Sent(calls, timeout)
                for pending in calls:
                    pending.sent = sent
                # Both refer to this task, and a cancelled task refers to this frame.
                del sent, timeout
                try:
                    await self._clients[key.device].infer(batch, deliver)
                except ReplicasLost:
                    if len(calls) == 1:
                        raise
                    await self._infer_one_by_one(key, calls)
        except Exception as exc:  # noqa: BLE001  every caller gets the error
            error = exc
        finally:
            for pending in calls:
                pending.sent = None
        _fail(calls, error)

    def _stop_waiting(self, device: Device, pending: PendingCall) -> None:
        self._waiting[device] -= pending.characters
        pending.characters = 0

    async def _infer_one_by_one(self, key: BatchKey, calls: Sequence[PendingCall]) -> None:
        """Send the unanswered calls of a micro-batch one at a time, after replicas were lost.

        One of the calls may crash every replica that computes it. Sent alone, this call makes no
        other call fail.
        """
        for pending in calls:
            if pending.outcome.done():
                continue

            def deliver(_index: int, outcome: CallOutcome, pending: PendingCall = pending) -> None:
                pending.settle(outcome)

            try:
                await self._clients[key.device].infer(CallBatch(key, (pending.call,)), deliver)
            except ServeError as error:
                pending.settle(error)


def _fail(calls: Sequence[PendingCall], error: Exception) -> None:
    """Settle all calls without an outcome. Other errors than a ServeError keep their traceback.

    The server logs it.
    """
    if isinstance(error, ServeError):
        forget_frames(error)
    for pending in calls:
        pending.settle(error)


def serve_micro_batches(send: SendMicroBatch, get_settings: GetSettings) -> Submit:
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

    async def submit(self, collect: Submit, call: PendingCall) -> None:
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
