"""Callers that leave a micro-batch before it is sent, or at the moment when it expires."""

from __future__ import annotations

import asyncio
import time

import pytest

from deployments.artifacts.types import Device
from deployments.errors import DeadlineExceeded
from deployments.ingress.micro_batches import (
    GetSettings,
    MicroBatchDispatcher,
    PendingCall,
    SendMicroBatch,
    SubmitCall,
)
from tests.support.fakes import FakeClock, HangingEncoder, RecordingEncoder, batch_by, wait_until
from tests.unit.deployments.ingress.test_micro_batches import SHORT, call


class HeldCollection:
    """A BuildSubmit whose callers wait, as in @serve.batch, until `send` sent their calls."""

    def __init__(self) -> None:
        self.calls: list[PendingCall] = []
        self._send: SendMicroBatch | None = None
        self._sent = asyncio.Event()

    def __call__(self, send: SendMicroBatch, _settings: GetSettings) -> SubmitCall:
        self._send = send
        return self._collect

    async def _collect(self, pending: PendingCall) -> None:
        self.calls.append(pending)
        await self._sent.wait()

    async def send(self) -> None:
        assert self._send is not None
        await self._send(self.calls)
        self._sent.set()


async def test_call_whose_caller_left_while_it_was_collected_is_not_computed() -> None:
    encoder, collection = RecordingEncoder(), HeldCollection()
    dispatcher = MicroBatchDispatcher({Device.CPU: encoder}, collection)
    leaving, staying = (asyncio.create_task(dispatcher.run(SHORT, call(text))) for text in "ab")
    await wait_until(lambda: len(collection.calls) == 2)
    leaving.cancel()
    await asyncio.wait({leaving})
    await collection.send()
    await staying
    assert [one.texts for one in encoder.calls] == [("b",)]


async def test_deadline_that_ends_a_call_together_with_its_micro_batch_is_exceeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock stands still while both timers start, so that they end in the same step."""
    clock, encoder = FakeClock(), HangingEncoder()
    dispatcher = MicroBatchDispatcher({Device.CPU: encoder}, batch_by(1))
    monkeypatch.setattr(time, "monotonic", clock)
    task = asyncio.create_task(dispatcher.run(SHORT, call("a", clock.now_s + 1)))
    while not encoder.batches:
        await asyncio.sleep(0)
    clock.now_s += 2
    with pytest.raises(DeadlineExceeded):
        await task
