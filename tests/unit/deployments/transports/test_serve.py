from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.artifacts.types import Device, TaskName
from deployments.deadlines import deadline_after
from deployments.errors import Overloaded, ReplicasLost, ServeError, UnknownToken
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallResult,
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    TokenizeRequest,
    Truncation,
)
from deployments.transports.serve import (
    ServeEncoderClient,
    ServeGeneratorClient,
    ServeTokenizerClient,
    to_deadlines,
)
from tests.support.fakes import collect_outcomes, far_deadline, wait_until

KEY = BatchKey(
    ModelRef("tiny/model", "0123456789ab"), TaskName.FEATURE_EXTRACTION, Device.CPU, long=False
)
BATCH = CallBatch(KEY, (Call(("a",), ("inputs",), None, Truncation.REFUSE, far_deadline()),))
ANSWERS = [CallResult("value", "fake")]


class FakeMethod:
    """A method of a Serve handle. `remote` returns a future of the next item of `outcomes`."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)
        self.sent: list[object] = []
        self.serialization: set[str] = set()

    def options(self, *, request_serialization: str, response_serialization: str) -> FakeMethod:
        self.serialization = {request_serialization, response_serialization}
        return self

    def remote(self, argument: object) -> asyncio.Future[object]:
        self.sent.append(argument)
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)
        return reply


class FakeHandle:
    """A Serve handle with the methods of all deployments."""

    def __init__(self, *outcomes: object) -> None:
        self.tokenize_batch = self.infer = self.tokenize = self.decode = FakeMethod(*outcomes)


def unavailable() -> Exception:
    return DeploymentUnavailableError("no replica")


async def test_infer_forwards_the_unresolved_tokenizer_response() -> None:
    tokenizer, encoder = FakeHandle("encoded"), FakeHandle(ANSWERS)
    assert await collect_outcomes(ServeEncoderClient(tokenizer, encoder), BATCH) == ANSWERS
    (argument,) = encoder.infer.sent
    assert isinstance(argument, asyncio.Future), "the encoder resolves it, not the ingress"
    (sent,) = tokenizer.tokenize_batch.sent
    assert sent.key == BATCH.key


async def test_remaining_time_crosses_processes_instead_of_a_clock() -> None:
    tokenizer, encoder = FakeHandle("encoded"), FakeHandle(ANSWERS)
    deadline_s = deadline_after(3_600.0)
    batch = BATCH._replace(calls=(BATCH.calls[0]._replace(deadline_s=deadline_s),))
    await collect_outcomes(ServeEncoderClient(tokenizer, encoder), batch)
    (sent,) = tokenizer.tokenize_batch.sent
    assert sent.calls[0].deadline_s == pytest.approx(3_600, abs=60)
    (received,) = to_deadlines(sent).calls
    assert received.deadline_s == pytest.approx(deadline_s, abs=60)


async def test_infer_serializes_with_pickle() -> None:
    tokenizer, encoder = FakeHandle("encoded"), FakeHandle(ANSWERS)
    await collect_outcomes(ServeEncoderClient(tokenizer, encoder), BATCH)
    assert tokenizer.tokenize_batch.serialization == encoder.infer.serialization == {"pickle"}


@pytest.mark.parametrize("error", [RayActorError, unavailable])
async def test_infer_survives_a_lost_tokenizer_and_a_lost_encoder(
    error: Callable[[], Exception],
) -> None:
    tokenizer, encoder = FakeHandle("1", "2", "3"), FakeHandle(error(), error(), ANSWERS)
    assert await collect_outcomes(ServeEncoderClient(tokenizer, encoder), BATCH) == ANSWERS
    assert len(tokenizer.tokenize_batch.sent) == len(encoder.infer.sent) == 3


@pytest.mark.parametrize("error", [RayActorError, unavailable])
async def test_infer_fails_when_more_replicas_are_lost(error: Callable[[], Exception]) -> None:
    tokenizer, encoder = FakeHandle("1", "2", "3"), FakeHandle(error(), error(), error())
    with pytest.raises(ReplicasLost, match="3 replicas were lost"):
        await collect_outcomes(ServeEncoderClient(tokenizer, encoder), BATCH)


async def test_infer_maps_backpressure_to_overloaded_without_retry() -> None:
    backpressure = BackPressureError(num_queued_requests=256, max_queued_requests=256)
    tokenizer, encoder = FakeHandle("first", "second"), FakeHandle(backpressure, ANSWERS)
    with pytest.raises(Overloaded):
        await collect_outcomes(ServeEncoderClient(tokenizer, encoder), BATCH)
    assert len(encoder.infer.sent) == 1


TOKENIZE = TokenizeRequest(KEY.model, ("a",), special=True)
DECODE = DecodeRequest(KEY.model, ((5,),), skip_special=True)


async def call_both(*outcomes: object) -> list[object]:
    """Return the results of both tokenizer methods when the replicas return `outcomes`."""
    answers: list[object] = []
    for request in (TOKENIZE, DECODE):
        handle = FakeHandle(*outcomes)
        client = ServeTokenizerClient(handle)
        method = client.tokenize if request is TOKENIZE else client.decode
        try:
            answers.append(await method(request))
        except ServeError as error:
            answers.append(error)
        assert set(map(id, handle.decode.sent)) == {id(request)}
        assert handle.decode.serialization == {"pickle"}
    return answers


async def test_tokenizer_client_returns_results_and_raises_errors() -> None:
    assert await call_both(("answer",)) == [("answer",)] * 2
    rejected = UnknownToken("token id 7 is not in the vocabulary")
    assert await call_both(rejected) == [rejected] * 2


async def test_tokenizer_client_retries_a_lost_replica_once() -> None:
    assert await call_both(unavailable(), ("answer",)) == [("answer",)] * 2
    failures = await call_both(unavailable(), unavailable(), ("too late",))
    assert [type(failure) for failure in failures] == [ReplicasLost] * 2


CALL = GenerationCall(KEY.model, "Once", GenerationOptions(), deadline_s=0.0)


class SilentHandle:
    """A Serve handle that never responds."""

    def __init__(self) -> None:
        self.complete = self.stream = self.tokenize_batch = self.infer = self
        self.tokenize = self.decode = self
        self.responses: list[SilentResponse] = []

    def options(self, **options: object) -> SilentHandle:
        return self

    def remote(self, call: object) -> SilentResponse:
        self.responses.append(SilentResponse())
        return self.responses[-1]


class SilentResponse:
    """A pending Serve response. Cancelling its awaiting task does not cancel it."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def __await__(self) -> Generator[object, None, object]:
        return asyncio.Event().wait().__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize(
    ("ask", "responses"),
    [
        pytest.param(lambda handle: ServeGeneratorClient(handle).complete(CALL), 1, id="complete"),
        pytest.param(
            lambda handle: collect_outcomes(ServeEncoderClient(handle, handle), BATCH),
            2,
            id="infer",
        ),
        pytest.param(
            lambda handle: ServeTokenizerClient(handle).tokenize(TOKENIZE), 1, id="tokenize"
        ),
        pytest.param(lambda handle: ServeTokenizerClient(handle).decode(DECODE), 1, id="decode"),
    ],
)
async def test_cancelled_caller_cancels_the_serve_responses(
    ask: Callable[[SilentHandle], Coroutine[object, object, object]], responses: int
) -> None:
    handle = SilentHandle()
    task = asyncio.create_task(ask(handle))
    await wait_until(lambda: len(handle.responses) == responses)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [response.is_cancelled for response in handle.responses] == [True] * responses
