from __future__ import annotations

import asyncio
import time

import pytest
from ray.serve import context

from deployments.artifacts.types import Device, TaskName
from deployments.config import MicroBatchSettings
from deployments.deadlines import deadline_after
from deployments.errors import (
    DeadlineExceeded,
    EngineFailed,
    InputTooLong,
    Overloaded,
    ReplicasLost,
)
from deployments.ingress.batch_slots import serve_micro_batches
from deployments.ingress.micro_batches import (
    GetSettings,
    MicroBatchDispatcher,
    PendingCall,
    SendMicroBatch,
    SubmitCall,
)
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallResult,
    ModelRef,
    Truncation,
)
from deployments.transports.base import Deliver, EncoderClient
from tests.support.fakes import (
    FailingEncoder,
    HangingEncoder,
    batch_by,
    far_deadline,
    send_unbatched,
    wait_until,
)
from tests.support.loop_clock import LoopClock

SHORT = BatchKey(
    ModelRef("tiny/model", "0123456789ab"), TaskName.FEATURE_EXTRACTION, Device.CPU, long=False
)
LONG = SHORT._replace(long=True)
OTHER = SHORT._replace(task=TaskName.TEXT_CLASSIFICATION)


def call(text: str, deadline_s: float | None = None) -> Call:
    return Call((text,), ("inputs",), None, Truncation.REFUSE, deadline_s or far_deadline())


class EchoEncoder:
    """An encoder that returns the text of every call.

    The text `refused` fails as too long. The text `forgotten` gets no outcome.
    """

    def __init__(self) -> None:
        self.lists: list[list[str]] = []

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        texts = [call.texts[0] for call in batch.calls]
        self.lists.append(texts)
        for index, text in enumerate(texts):
            if text == "refused":
                deliver(index, InputTooLong("too long", field="inputs"))
            elif text != "forgotten":
                deliver(index, CallResult(text, "fake"))


@pytest.fixture
def serve_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable a check of @serve.batch that needs a current replica, which tests do not have."""
    warning = "_warn_if_max_batch_size_exceeds_max_ongoing_requests"
    monkeypatch.setattr(f"ray.serve.batching._BatchQueue.{warning}", lambda queue: None)


def build_dispatcher(
    encoder: EncoderClient, batched: object = send_unbatched
) -> MicroBatchDispatcher:
    return MicroBatchDispatcher({Device.CPU: encoder}, batched)


async def test_each_call_of_a_batch_gets_its_own_outcome() -> None:
    encoder = EchoEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(3))
    outcomes = await asyncio.gather(
        *(dispatcher.run(SHORT, call(text)) for text in ("a", "refused", "b")),
        return_exceptions=True,
    )
    assert encoder.lists == [["a", "refused", "b"]]
    assert (outcomes[0].value, outcomes[2].value) == ("a", "b")
    assert isinstance(outcomes[1], InputTooLong)


async def test_calls_with_different_keys_are_not_batched() -> None:
    encoder = EchoEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(2))
    keyed = [(SHORT, "a"), (OTHER, "b"), (SHORT, "c"), (OTHER, "d")]
    await asyncio.gather(*(dispatcher.run(key, call(text)) for key, text in keyed))
    assert sorted(encoder.lists) == [["a", "c"], ["b", "d"]]


async def test_long_calls_are_sent_alone() -> None:
    encoder = EchoEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(2))
    await asyncio.gather(*(dispatcher.run(LONG, call(text)) for text in "ab"))
    assert encoder.lists == [["a"], ["b"]]


@pytest.mark.parametrize("error", [Overloaded("full"), EngineFailed("lost")])
async def test_transport_failure_is_the_outcome_of_every_call(error: Exception) -> None:
    dispatcher = build_dispatcher(FailingEncoder(error), batch_by(2))
    outcomes = await asyncio.gather(
        *(dispatcher.run(SHORT, call(text)) for text in "ab"), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [type(error)] * 2


async def test_unexpected_failure_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await build_dispatcher(FailingEncoder(ZeroDivisionError())).run(SHORT, call("a"))


async def test_hanging_encoder_ends_at_the_deadline_and_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, encoder = LoopClock(monkeypatch), HangingEncoder()
    running = asyncio.ensure_future(
        build_dispatcher(encoder).run(SHORT, call("a", deadline_after(60.0)))
    )
    await wait_until(lambda: encoder.batches == 1)
    await clock.advance(20.0)
    assert not running.done()
    await clock.advance(40.0)
    with pytest.raises(DeadlineExceeded):
        await running
    assert (encoder.batches, encoder.cancelled) == (1, 1)


async def test_batch_has_the_latest_deadline_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, encoder = LoopClock(monkeypatch), HangingEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(2))
    hasty, patient = [
        asyncio.ensure_future(dispatcher.run(SHORT, call("a", deadline_after(timeout_s))))
        for timeout_s in (60.0, 600.0)
    ]
    await wait_until(lambda: encoder.batches == 1)
    await clock.advance(60.0)
    with pytest.raises(DeadlineExceeded):
        await hasty
    assert encoder.cancelled == 0
    await clock.advance(540.0)
    with pytest.raises(DeadlineExceeded):
        await patient
    await wait_until(lambda: encoder.cancelled == 1)


async def test_batch_is_cancelled_when_all_its_callers_have_left() -> None:
    encoder = HangingEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(2))
    first, second = [asyncio.ensure_future(dispatcher.run(SHORT, call("a"))) for _ in range(2)]
    await wait_until(lambda: encoder.batches == 1)
    first.cancel()
    await asyncio.sleep(0.02)
    assert encoder.cancelled == 0
    second.cancel()
    await wait_until(lambda: encoder.cancelled == 1)


async def test_call_whose_caller_left_while_it_was_collected_is_not_sent() -> None:
    encoder = EchoEncoder()
    collected: list[PendingCall] = []

    def batcher(send: SendMicroBatch, _settings: GetSettings) -> SubmitCall:
        async def submit(pending: PendingCall) -> None:
            collected.append(pending)
            if len(collected) == 3:
                await send(collected)

        return submit

    dispatcher = build_dispatcher(encoder, batcher)
    calls = [asyncio.ensure_future(dispatcher.run(SHORT, call(text))) for text in "ab"]
    await wait_until(lambda: len(collected) == 2)
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    assert (await dispatcher.run(SHORT, call("c"))).value == "c"
    assert encoder.lists == [["b", "c"]]
    assert (await calls[1]).value == "b"


async def test_expired_call_fails_at_once() -> None:
    with pytest.raises(DeadlineExceeded):
        await build_dispatcher(HangingEncoder()).run(
            SHORT, call("a", deadline_s=time.monotonic() - 1)
        )


class BacklogEncoder(EchoEncoder):
    """An encoder that records the backlog of every micro-batch, in characters."""

    def __init__(self) -> None:
        super().__init__()
        self.backlogs: list[int] = []

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.backlogs.append(batch.backlog)
        await super().infer(batch, deliver)


async def test_micro_batch_tells_how_many_characters_wait_behind_it() -> None:
    encoder = BacklogEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(2))
    waiting = asyncio.ensure_future(dispatcher.run(OTHER, call("waits")))
    await asyncio.sleep(0)
    await asyncio.gather(*(dispatcher.run(SHORT, call(text)) for text in "ab"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.gather(*(dispatcher.run(SHORT, call(text)) for text in "cd"))
    assert encoder.backlogs == [len("waits"), 0]


async def test_collected_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.micro_batches.MAX_KEYS", 3)
    dispatcher = build_dispatcher(EchoEncoder())
    for number in range(8):
        key = SHORT._replace(model=ModelRef(f"tiny/model{number}", "0123456789ab"))
        assert (await dispatcher.run(key, call("text"))).value == "text"
    assert len(dispatcher._submitters) <= 3


class SuspendingEncoder(EchoEncoder):
    """An encoder that lets other tasks run before it answers."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        await asyncio.sleep(0)
        await super().infer(batch, deliver)


async def test_new_settings_apply_without_further_tasks(serve_batch: None) -> None:
    encoder = SuspendingEncoder()
    dispatcher = build_dispatcher(encoder, serve_micro_batches)

    async def run_together() -> list[int]:
        encoder.lists.clear()
        await asyncio.gather(*(dispatcher.run(SHORT, call(text)) for text in "abcde"))
        return [len(texts) for texts in encoder.lists]

    assert await run_together() == [1, 4]
    tasks = len(asyncio.all_tasks())
    for max_batch_size in range(5, 25):
        dispatcher.configure(MicroBatchSettings(max_batch_size=max_batch_size))
        await run_together()
    assert len(asyncio.all_tasks()) == tasks
    dispatcher.configure(MicroBatchSettings(max_batch_size=2))
    assert await run_together() == [1, 2, 2]
    dispatcher.configure(MicroBatchSettings(batch_wait_timeout_s=0.01))
    assert await run_together() == [5]


async def test_lone_call_is_sent_without_collecting() -> None:
    encoder = EchoEncoder()
    dispatcher = build_dispatcher(encoder, serve_micro_batches)
    assert (await dispatcher.run(SHORT, call("a"))).value == "a"
    assert (await dispatcher.run(SHORT, call("b"))).value == "b"
    assert encoder.lists == [["a"], ["b"]]


class PoisonedEncoder(EchoEncoder):
    """An encoder that loses its replicas if a micro-batch contains the text `poison`.

    It still answers the first call, unless that call is the poison.
    """

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        texts = [call.texts[0] for call in batch.calls]
        if "poison" not in texts:
            await super().infer(batch, deliver)
            return
        self.lists.append(texts)
        if texts[0] != "poison":
            deliver(0, CallResult(texts[0], "fake"))
        raise ReplicasLost("3 replicas were lost")


async def test_call_that_ends_its_replicas_is_found_and_the_others_are_answered() -> None:
    encoder = PoisonedEncoder()
    dispatcher = build_dispatcher(encoder, batch_by(4))
    outcomes = await asyncio.gather(
        *(dispatcher.run(SHORT, call(text)) for text in ("a", "poison", "b", "c")),
        return_exceptions=True,
    )
    poisoned = outcomes.pop(1)
    assert [outcome.value for outcome in outcomes] == ["a", "b", "c"]
    assert isinstance(poisoned, ReplicasLost)
    assert (poisoned.status, poisoned.retryable, poisoned.retry_after_s) == (503, True, 5.0)
    assert encoder.lists == [["a", "poison", "b", "c"], ["poison"], ["b"], ["c"]]


async def test_lone_call_that_ends_its_replicas_is_not_sent_again() -> None:
    encoder = PoisonedEncoder()
    with pytest.raises(ReplicasLost):
        await build_dispatcher(encoder).run(SHORT, call("poison"))
    assert encoder.lists == [["poison"]]


async def test_model_header_of_clients_splits_no_micro_batch(serve_batch: None) -> None:
    encoder, release = EchoEncoder(), asyncio.Event()

    async def send(calls: list[PendingCall]) -> None:
        await release.wait()
        encoder.lists.append([pending.call.texts[0] for pending in calls])
        for pending in calls:
            pending.settle(CallResult("done", "fake"))

    settings = MicroBatchSettings(max_concurrent_batches=1)
    submit = serve_micro_batches(send, lambda: settings)

    async def request(number: int) -> None:
        # Ray Serve sets the context of a request from its headers.
        context._serve_request_context.set(
            context._RequestContext(multiplexed_model_id=f"client {number}")
        )
        pending = PendingCall(call(str(number)), asyncio.get_running_loop().create_future())
        await submit(pending)
        await pending.outcome

    tasks = [asyncio.create_task(request(number)) for number in range(6)]
    await asyncio.sleep(0.05)
    release.set()
    await asyncio.gather(*tasks)
    assert encoder.lists == [["0"], ["1", "2", "3", "4", "5"]]


async def test_call_without_an_outcome_fails() -> None:
    dispatcher = build_dispatcher(EchoEncoder(), batch_by(2))
    answered, forgotten = await asyncio.gather(
        *(dispatcher.run(SHORT, call(text)) for text in ("a", "forgotten")), return_exceptions=True
    )
    assert isinstance(answered, CallResult)
    assert isinstance(forgotten, EngineFailed)


async def test_call_is_answered_before_the_others_of_its_batch() -> None:
    may_end = asyncio.Event()

    class SlowEncoder(EchoEncoder):
        async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
            deliver(1, CallResult("early", "fake"))
            await may_end.wait()
            deliver(0, CallResult("late", "fake"))

    dispatcher = build_dispatcher(SlowEncoder(), batch_by(2))
    late, early = [asyncio.ensure_future(dispatcher.run(SHORT, call(text))) for text in "ab"]
    assert (await early).value == "early"
    assert not late.done()
    may_end.set()
    assert (await late).value == "late"


async def test_batch_is_cancelled_when_the_unanswered_callers_have_left() -> None:
    encoder = HangingEncoder()

    class AnswersFirst(EchoEncoder):
        async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
            deliver(0, CallResult("a", "fake"))
            await encoder.infer(batch, deliver)

    dispatcher = build_dispatcher(AnswersFirst(), batch_by(2))
    answered, left = [asyncio.ensure_future(dispatcher.run(SHORT, call(text))) for text in "ab"]
    await answered
    assert encoder.cancelled == 0
    left.cancel()
    await wait_until(lambda: encoder.cancelled == 1)
