from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.config import MicroBatchSettings
from deployments.ingress.batch_slots import BatchSlots
from deployments.ingress.micro_batches import PendingCall, SendMicroBatch
from deployments.messages import Call, CallOutcome, CallResult, Truncation
from tests.support.fakes import far_deadline, wait_until


class HeldEncoder:
    """An encoder that answers once `release` is set. `sent` has the clients of each micro-batch."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.release = asyncio.Event()

    @property
    def sizes(self) -> list[int]:
        return list(map(len, self.sent))

    async def send(self, calls: list[PendingCall]) -> None:
        self.sent.append([one.call.client for one in calls])
        await self.release.wait()
        for one in calls:
            one.settle(CallResult(one.call.texts[0], "fake"))


def collect_by_turn(
    send: SendMicroBatch, max_batch_size: int, batch_wait_timeout_s: float = 0.0
) -> Callable[..., Coroutine[Any, Any, CallOutcome]]:
    """Return a function that submits a text to BatchSlots with one slot per client.

    Calls of the same step of the event loop form one micro-batch.
    """
    settings = MicroBatchSettings(
        max_concurrent_batches=1,
        max_batch_size=max_batch_size,
        batch_wait_timeout_s=batch_wait_timeout_s,
    )
    slots = BatchSlots(send, lambda: settings)
    queue: list[PendingCall] = []

    async def collect(pending: PendingCall) -> None:
        queue.append(pending)
        await asyncio.sleep(0)
        if queue:
            group, queue[:] = queue[:], []
            await slots.start(group)

    async def submit(text: str, client: str = "", priority: int = 0) -> CallOutcome:
        call = Call((text,), ("inputs",), None, Truncation.REFUSE, far_deadline())
        pending = PendingCall(
            call._replace(client=client, priority=priority),
            asyncio.get_running_loop().create_future(),
        )
        await slots.submit(collect, pending)
        return await pending.outcome

    return submit


async def test_calls_without_a_free_slot_are_sent_together() -> None:
    encoder = HeldEncoder()
    submit = collect_by_turn(encoder.send, max_batch_size=8)
    calls = []
    for text in ("a", "b", "c", "d"):  # one by one, as from separate connections
        calls.append(asyncio.ensure_future(submit(text)))
        await asyncio.sleep(0)
    calls[2].cancel()
    await asyncio.sleep(0)
    assert encoder.sizes == [1]
    encoder.release.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert encoder.sizes == [1, 2]
    assert [outcome.value for outcome in (outcomes[0], outcomes[1], outcomes[3])] == ["a", "b", "d"]
    assert isinstance(outcomes[2], asyncio.CancelledError)


@pytest.mark.parametrize(("batch_wait_timeout_s", "sizes"), [(0.0, [1, 1]), (0.01, [2])])
async def test_first_call_of_an_idle_ingress_waits_for_others_only_if_configured(
    batch_wait_timeout_s: float, sizes: list[int]
) -> None:
    encoder = HeldEncoder()
    encoder.release.set()
    submit = collect_by_turn(encoder.send, 8, batch_wait_timeout_s)
    await asyncio.gather(submit("a"), submit("b"))
    assert encoder.sizes == sizes


async def test_client_does_not_wait_for_the_slots_of_another() -> None:
    encoder = HeldEncoder()
    submit = collect_by_turn(encoder.send, max_batch_size=8)
    calls = []
    for client in ("loud", "loud", "loud", "quiet", "quiet"):
        calls.append(asyncio.ensure_future(submit("text", client)))
        await asyncio.sleep(0)
    await wait_until(lambda: len(encoder.sent) == 2)
    assert encoder.sent == [["loud"], ["quiet"]]
    encoder.release.set()
    await asyncio.gather(*calls)
    assert encoder.sent[2:] == [["loud", "loud", "quiet"]], "they enter together"


async def test_interactive_call_does_not_wait_for_the_slots_of_a_batch_job() -> None:
    encoder = HeldEncoder()
    submit = collect_by_turn(encoder.send, max_batch_size=8)
    calls = []
    for priority in (1, 1, 1, 0):
        calls.append(asyncio.ensure_future(submit("text", "alice", priority)))
        await asyncio.sleep(0)
    await wait_until(lambda: len(encoder.sent) == 2)
    encoder.release.set()
    await asyncio.gather(*calls)
    assert encoder.sizes == [1, 1, 2]


async def test_full_micro_batch_does_not_wait_for_a_slot() -> None:
    """Its calls wait in the queues of the replicas instead, which are fair to clients."""
    encoder = HeldEncoder()
    submit = collect_by_turn(encoder.send, max_batch_size=4)
    calls = [asyncio.ensure_future(submit(text)) for text in "abcdefg"]
    await wait_until(lambda: sum(encoder.sizes) == 5)
    assert encoder.sizes == [1, 4]
    encoder.release.set()
    await wait_until(lambda: sum(encoder.sizes) == 7)
    await asyncio.gather(*calls)
