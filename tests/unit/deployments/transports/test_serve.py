from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.artifacts.types import Device, TaskName
from deployments.errors import EngineFailed, Overloaded, ServeError, UnknownToken
from deployments.generation.messages import GenerationCall, GenerationOptions
from deployments.messages import (
    BatchKey,
    CallBatch,
    CallResult,
    DecodeRequest,
    ModelRef,
    TokenizeRequest,
)
from deployments.transports.serve import (
    ServeEncoderClient,
    ServeGeneratorClient,
    ServeTokenizerClient,
)

KEY = BatchKey(
    ModelRef("tiny/model", "0123456789ab"), TaskName.FEATURE_EXTRACTION, Device.CPU, long=False
)
BATCH = CallBatch(KEY, ())
ANSWERS = [CallResult("value", "fake")]


class FakeMethod:
    """A method of a Serve handle: `remote` gives the next of `outcomes`, awaited or not."""

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
    """A Serve handle with every deployment's methods."""

    def __init__(self, *outcomes: object) -> None:
        self.tokenize_batch = self.infer = self.tokenize = self.decode = FakeMethod(*outcomes)


def unavailable() -> Exception:
    return DeploymentUnavailableError("no replica")


async def test_the_tokenizers_response_is_passed_on_without_waiting_for_it() -> None:
    tokenizer, encoder = FakeHandle("encoded"), FakeHandle(ANSWERS)
    assert await ServeEncoderClient(tokenizer, encoder).infer(BATCH) == ANSWERS
    (passed,) = encoder.infer.sent
    assert isinstance(passed, asyncio.Future), "the encoder waits for it, not the ingress"
    assert tokenizer.tokenize_batch.sent == [BATCH]


async def test_messages_travel_as_plain_pickle() -> None:
    tokenizer, encoder = FakeHandle("encoded"), FakeHandle(ANSWERS)
    await ServeEncoderClient(tokenizer, encoder).infer(BATCH)
    assert tokenizer.tokenize_batch.serialization == encoder.infer.serialization == {"pickle"}


@pytest.mark.parametrize("lost", [RayActorError, unavailable])
async def test_a_lost_replica_is_tried_once_more(lost: Callable[[], Exception]) -> None:
    tokenizer, encoder = FakeHandle("first", "second"), FakeHandle(lost(), ANSWERS)
    assert await ServeEncoderClient(tokenizer, encoder).infer(BATCH) == ANSWERS
    assert len(tokenizer.tokenize_batch.sent) == len(encoder.infer.sent) == 2


@pytest.mark.parametrize("lost", [RayActorError, unavailable])
async def test_a_replica_lost_twice_is_an_engine_failure(lost: Callable[[], Exception]) -> None:
    tokenizer, encoder = FakeHandle("first", "second"), FakeHandle(lost(), lost())
    with pytest.raises(EngineFailed, match="lost twice"):
        await ServeEncoderClient(tokenizer, encoder).infer(BATCH)


async def test_a_full_line_on_the_way_is_overload_and_not_tried_again() -> None:
    full = BackPressureError(num_queued_requests=256, max_queued_requests=256)
    tokenizer, encoder = FakeHandle("first", "second"), FakeHandle(full, ANSWERS)
    with pytest.raises(Overloaded):
        await ServeEncoderClient(tokenizer, encoder).infer(BATCH)
    assert len(encoder.infer.sent) == 1


TOKENIZE = TokenizeRequest(KEY.model, ("a",), special=True)
DECODE = DecodeRequest(KEY.model, ((5,),), skip_special=True)


async def ask_both(*outcomes: object) -> list[object]:
    """What either method of a tokenizer gives when its replicas give `outcomes`."""
    answers: list[object] = []
    for request in (TOKENIZE, DECODE):
        handle = FakeHandle(*outcomes)
        client = ServeTokenizerClient(handle)
        ask = client.tokenize if request is TOKENIZE else client.decode
        try:
            answers.append(await ask(request))
        except ServeError as error:
            answers.append(error)
        assert set(map(id, handle.decode.sent)) == {id(request)}
        assert handle.decode.serialization == {"pickle"}
    return answers


async def test_a_tokenizers_answer_comes_through_and_its_errors_are_raised() -> None:
    assert await ask_both(("answer",)) == [("answer",)] * 2
    refused = UnknownToken("token id 7 is not in the vocabulary")
    assert await ask_both(refused) == [refused] * 2


async def test_a_lost_tokenizer_is_asked_once_more_and_not_twice() -> None:
    assert await ask_both(unavailable(), ("answer",)) == [("answer",)] * 2
    failures = await ask_both(unavailable(), unavailable(), ("too late",))
    assert [type(failure) for failure in failures] == [EngineFailed] * 2


CALL = GenerationCall(KEY.model, "Once", GenerationOptions(), deadline_s=0.0)


class FakeGenerator:
    """A Serve handle of a generator that never answers; it notes who is cancelled."""

    def __init__(self) -> None:
        self.complete = self.stream = self
        self.responses: list[SilentResponse] = []

    def options(self, **options: object) -> FakeGenerator:
        return self

    def remote(self, call: GenerationCall) -> SilentResponse:
        self.responses.append(SilentResponse())
        return self.responses[-1]


class SilentResponse:
    """As a response of Serve: it does not end with the task that waits for it."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def __await__(self) -> Generator[object, None, object]:
        return asyncio.Event().wait().__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_generator_hears_of_a_caller_who_has_left() -> None:
    generator = FakeGenerator()
    asking = asyncio.create_task(ServeGeneratorClient(generator).complete(CALL))
    while not generator.responses:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (response,) = generator.responses
    assert response.is_cancelled
