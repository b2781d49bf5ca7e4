from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.artifacts.types import Device, TaskName
from deployments.deadlines import deadline_after
from deployments.errors import (
    EngineFailed,
    ModelUnavailable,
    Overloaded,
    ReplicasLost,
    ServeError,
    UnknownToken,
)
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallResult,
    Chunk,
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    Started,
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


class StreamResponse:
    """A Serve response of a stream: events, or an exception in place of the next event."""

    def __init__(self, *events: object) -> None:
        self._events = list(events)
        self.is_cancelled = False

    def __aiter__(self) -> StreamResponse:
        return self

    async def __anext__(self) -> object:
        if not self._events:
            raise StopAsyncIteration
        event = self._events.pop(0)
        if isinstance(event, Exception) and not isinstance(event, ServeError):
            raise event
        return event

    def cancel(self) -> None:
        self.is_cancelled = True


class StreamingHandle:
    """A Serve handle whose streams are `responses`, in order."""

    def __init__(self, *responses: StreamResponse) -> None:
        self.complete = self.stream = self.tokenize_prompt = self
        self.responses = list(responses)
        self.started: list[StreamResponse] = []

    def options(self, **options: object) -> StreamingHandle:
        return self

    def remote(self, call: object) -> StreamResponse:
        self.started.append(self.responses.pop(0))
        return self.started[-1]


async def collect_stream(handle: StreamingHandle) -> list[object]:
    events: list[object] = []
    try:
        async for event in ServeGeneratorClient(handle).stream(CALL):
            events.append(event)
    except ServeError as error:
        events.append(type(error))
    return events


STARTED = Started(1, 0, 7, "cpu-fp32")
CHUNK = Chunk("text", ())


def without_room() -> ServeError:
    return ModelUnavailable("no memory for the model")


@pytest.mark.parametrize("failure", [without_room, unavailable, RayActorError])
async def test_stream_starts_again_on_another_replica(failure: Callable[[], Exception]) -> None:
    answer = StreamResponse(STARTED, CHUNK)
    handle = StreamingHandle(StreamResponse(failure()), StreamResponse(failure()), answer)
    assert await collect_stream(handle) == [STARTED, CHUNK]
    assert all(response.is_cancelled for response in handle.started)


async def test_stream_that_a_full_queue_refuses_is_not_repeated() -> None:
    handle = StreamingHandle(StreamResponse(Overloaded("the queue is full")))
    assert await collect_stream(handle) == [Overloaded]


@pytest.mark.parametrize(
    ("failure", "error"), [(without_room, ModelUnavailable), (unavailable, ReplicasLost)]
)
async def test_stream_ends_with_the_error_of_the_last_try(
    failure: Callable[[], Exception], error: type[ServeError]
) -> None:
    handle = StreamingHandle(*(StreamResponse(failure()) for _ in range(4)))
    assert await collect_stream(handle) == [error]
    assert len(handle.started) == 3


@pytest.mark.parametrize(
    ("failure", "error"), [(without_room, ModelUnavailable), (unavailable, EngineFailed)]
)
async def test_stream_that_has_started_is_not_repeated(
    failure: Callable[[], Exception], error: type[ServeError]
) -> None:
    handle = StreamingHandle(StreamResponse(STARTED, failure()), StreamResponse(STARTED))
    assert await collect_stream(handle) == [STARTED, error]


class SilentHandle:
    """A Serve handle that never responds."""

    def __init__(self) -> None:
        self.complete = self.stream = self.tokenize_prompt = self.tokenize_batch = self.infer = self
        self.tokenize = self.decode = self
        self.responses: list[SilentResponse] = []

    def options(self, **options: object) -> SilentHandle:
        return self

    def remote(self, call: object) -> SilentResponse:
        self.responses.append(SilentResponse())
        return self.responses[-1]


class SilentResponse:
    """A pending Serve response. Cancelling the task that awaits it does not cancel the response."""

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
            lambda handle: ServeGeneratorClient(handle).tokenize_prompt(CALL),
            1,
            id="tokenize prompt",
        ),
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
