"""Micro-batches: groups of calls that the ingress sends to an encoder deployment in one hop.

A hop between deployments costs the same for one call and for many, so concurrent short calls share
a hop. Short calls with an equal BatchKey (model, task, device) share a micro-batch. A long call is
sent alone, because other calls in its micro-batch would wait until it is tokenized.

A call takes this way: `MicroBatchDispatcher.run`; the SubmitCall of its key, which joins it
with other calls; `_send`, for the whole micro-batch. A BuildSubmit builds the SubmitCall of a key
around `_send`. In a server it is `serve_micro_batches` of batch_slots.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
SubmitCall = Callable[["PendingCall"], Awaitable[None]]
GetSettings = Callable[[], MicroBatchSettings]  # each call returns the present settings
BuildSubmit = Callable[[SendMicroBatch, GetSettings], SubmitCall]


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


class MicroBatchDispatcher:
    """Dispatcher of one ingress replica: collects calls into micro-batches for the encoders."""

    def __init__(self, clients: Mapping[Device, EncoderClient], build_submit: BuildSubmit) -> None:
        self._clients = clients
        self._build_submit = build_submit
        self._settings = MicroBatchSettings()
        self._submitters: dict[BatchKey, SubmitCall] = {}
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

    def _find_submitter(self, key: BatchKey) -> SubmitCall:
        submit = self._submitters.get(key)
        if submit is None:
            if len(self._submitters) >= MAX_KEYS:  # safe: waiting calls keep their submit function
                self._submitters = {}
            submit = self._build_submit(partial(self._send, key), lambda: self._settings)
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
