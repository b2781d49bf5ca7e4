"""Clients over real sockets to scripted replicas, and their fallback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.deadlines import deadline_after
from deployments.errors import InvalidField, Overloaded, ServeError
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallResult,
    Chunk,
    Completion,
    DecodeRequest,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationOptions,
    GenerationTimings,
    ModelRef,
    Outcome,
    Started,
    TextTokens,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
    Truncation,
)
from deployments.tasks.embedding import EmbeddingOptions
from deployments.transports.base import Deliver
from deployments.transports.channel.clients import (
    LONE_CALL_CHARACTERS,
    ChannelEncoderClient,
    ChannelGeneratorClient,
    ChannelTokenizerClient,
)
from deployments.transports.channel.pool import ReplicaPool
from deployments.transports.channel.server import ChannelServer, Service
from deployments.transports.channel.services import (
    encoder_service,
    generator_service,
    tokenizer_service,
)
from tests.support.channels import NODE, until
from tests.support.fakes import collect_outcomes

MODEL = ModelRef("tiny/model", "0123456789ab")
KEY = BatchKey(MODEL, TaskName.FEATURE_EXTRACTION, Device.CPU, long=False)
STARTED = Started(2, 0, 7, "fake")
CHUNK = Chunk("a", ())
LAST = Chunk("b", (), Finished(FinishReason.END, 2, GenerationTimings()))


def build_call(*texts: str) -> Call:
    options = EmbeddingOptions(normalize=True, dimensions=2)
    fields = tuple("inputs" for _ in texts)
    return Call(texts, fields, options, Truncation.REFUSE, deadline_after(10))


class FakeTokenizer:
    """One token per character; the text `too long` fails."""

    batches = 0

    async def tokenize_batch(self, batch: CallBatch) -> TokenizedBatch:
        self.batches += 1
        calls: list[TokenizedCall | ServeError] = []
        ids: list[int] = []
        for call in batch.calls:
            if call.texts == ("too long",):
                calls.append(InvalidField("too long", field="inputs"))
                continue
            ids += [ord(character) for text in call.texts for character in text]
            lengths = tuple(map(len, call.texts))
            calls.append(TokenizedCall(lengths, 0, call.options, call.deadline_s))
        return TokenizedBatch(batch.key, np.array(ids, "<i4").tobytes(), tuple(calls), 0.0)

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...] | ServeError:
        if request.model != MODEL:
            return Overloaded("full")
        empty = np.zeros((0, 2), np.int32)
        return tuple(TextTokens(np.array([len(t)], np.int32), empty, {}) for t in request.texts)

    async def decode(self, request: DecodeRequest) -> tuple[str, ...] | ServeError:
        return tuple("".join(map(chr, sequence)) for sequence in request.sequences)


class FakeEncoder:
    """The value of a call is the sum of its token ids.

    `may_answer` holds all answers back, `may_continue` those after the first.
    """

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_continue = asyncio.Event()
        self.may_continue.set()

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, Outcome], None]:
        await self.may_answer.wait()
        items = iter(batch.items())
        for index, call in enumerate(batch.calls):
            if isinstance(call, ServeError):
                yield {index: call}
            else:
                assert isinstance(call.options, EmbeddingOptions)
                sums = [[float(next(items).ids.sum())] for _ in call.lengths]
                yield {index: CallResult(np.array(sums, np.float32), "fake")}
                await self.may_continue.wait()


class FakeGenerator:
    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        if call.prompt == "full":
            return Overloaded("full")
        assert LAST.finished is not None
        return Completion(STARTED, str(call.prompt), (), LAST.finished)

    async def stream(
        self, call: GenerationCall
    ) -> AsyncGenerator[Started | Chunk | ServeError, None]:
        yield STARTED
        if call.prompt == "full":
            yield Overloaded("full")
            return
        yield CHUNK
        yield LAST


class Fallback:
    """Every client; records that it was called."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        self.calls.append(batch)
        for index in range(len(batch.calls)):
            deliver(index, CallResult("fallback", "fake"))

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        self.calls.append(request)
        return ()

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        self.calls.append(request)
        return ("fallback",)

    async def complete(self, call: GenerationCall) -> Completion:
        self.calls.append(call)
        assert LAST.finished is not None
        return Completion(STARTED, "fallback", (), LAST.finished)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        self.calls.append(call)
        yield STARTED


@asynccontextmanager
async def pool_of(service: Service) -> AsyncIterator[ReplicaPool]:
    server, pool = ChannelServer(service), ReplicaPool("Fake", NODE)
    pool.update({"0": await server.start(NODE, "127.0.0.1")})
    await until(lambda: pool.connected == 1)
    try:
        yield pool
    finally:
        pool.close()
        await server.close(1)


@pytest.fixture
def fallback() -> Fallback:
    return Fallback()


@pytest.fixture
async def pools() -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        encoder: Any = FakeEncoder()
        tokenizer: Any = FakeTokenizer()
        generator: Any = FakeGenerator()
        services = (
            tokenizer_service(tokenizer),
            encoder_service(encoder, tokenizer),
            generator_service(generator),
        )
        opened = [await stack.enter_async_context(pool_of(service)) for service in services]
        yield encoder, *opened


async def test_infer_returns_results_and_errors_in_order(pools: Any, fallback: Fallback) -> None:
    _, tokenizers, encoders, _ = pools
    batch = CallBatch(KEY, (build_call("a", "bc"), build_call("too long"), build_call("d")))
    client = ChannelEncoderClient(tokenizers, encoders, fallback)
    first, error, second = await collect_outcomes(client, batch)
    assert isinstance(first, CallResult)
    assert isinstance(second, CallResult)
    assert first.value.tolist() == [[97.0], [98.0 + 99.0]]
    assert second.value.tolist() == [[100.0]]
    assert isinstance(error, InvalidField)
    assert error.field == "inputs"
    assert fallback.calls == []


async def test_idle_encoder_tokenizes_a_short_call_itself(fallback: Fallback) -> None:
    encoder: Any = FakeEncoder()
    shared: Any = FakeTokenizer()
    own: Any = FakeTokenizer()
    async with (
        pool_of(tokenizer_service(shared)) as tokenizers,
        pool_of(encoder_service(encoder, own)) as encoders,
    ):
        client = ChannelEncoderClient(tokenizers, encoders, fallback)

        def send(text: str) -> asyncio.Task[list[Outcome]]:
            return asyncio.create_task(
                collect_outcomes(client, CallBatch(KEY, (build_call(text),)))
            )

        await send("a")
        assert (own.batches, shared.batches) == (1, 0)
        await send("a" * (LONE_CALL_CHARACTERS + 1))
        assert (own.batches, shared.batches) == (1, 1), "it is long"
        encoder.may_answer.clear()
        first = send("b")
        await until(lambda: own.batches == 2)
        second = send("c")
        await until(lambda: shared.batches == 2)
        encoder.may_answer.set()
        answers: Any = await asyncio.gather(first, second)
        values = [outcome.value.tolist() for (outcome,) in answers]
        assert values == [[[98.0]], [[99.0]]]
        assert own.batches == 2, "the encoder was busy"
        (error,) = await send("too long")
        assert isinstance(error, InvalidField)


async def test_encoder_tokenizes_while_no_tokenizer_answers(fallback: Fallback) -> None:
    encoder: Any = FakeEncoder()
    shared: Any = FakeTokenizer()
    own: Any = FakeTokenizer()
    batch = CallBatch(KEY, (build_call("a" * (LONE_CALL_CHARACTERS + 1)),))
    async with pool_of(encoder_service(encoder, own)) as encoders:
        async with pool_of(tokenizer_service(shared)) as tokenizers:
            client = ChannelEncoderClient(tokenizers, encoders, fallback)
            await collect_outcomes(client, batch)
        for pool in (tokenizers, ReplicaPool("Fake", NODE)):
            client = ChannelEncoderClient(pool, encoders, fallback)
            (outcome,) = await collect_outcomes(client, batch)
            assert isinstance(outcome, CallResult)
    assert (own.batches, shared.batches) == (2, 1)
    assert fallback.calls == []


async def test_outcomes_arrive_before_the_last_is_known(pools: Any, fallback: Fallback) -> None:
    encoder, tokenizers, encoders, _ = pools
    encoder.may_continue.clear()
    outcomes: dict[int, Outcome] = {}
    batch = CallBatch(KEY, (build_call("a"), build_call("b")))
    client = ChannelEncoderClient(tokenizers, encoders, fallback)
    call = asyncio.create_task(client.infer(batch, outcomes.__setitem__))
    await until(lambda: 0 in outcomes)
    assert not call.done()
    encoder.may_continue.set()
    await call
    assert outcomes.keys() == {0, 1}


async def test_batch_starts_again_when_the_encoder_is_lost_after_an_outcome(
    fallback: Fallback,
) -> None:
    first: Any = FakeEncoder()
    second: Any = FakeEncoder()
    first.may_continue.clear()
    outcomes: dict[int, Outcome] = {}
    batch = CallBatch(KEY, (build_call("a"), build_call("b")))
    tokenizer: Any = FakeTokenizer()
    lost = ChannelServer(encoder_service(first, tokenizer))
    encoders = ReplicaPool("Fake", NODE)
    encoders.update({"0": await lost.start(NODE, "127.0.0.1")})
    await until(lambda: encoders.connected == 1)
    client = ChannelEncoderClient(ReplicaPool("Fake", NODE), encoders, fallback)
    call = asyncio.create_task(client.infer(batch, outcomes.__setitem__))
    await until(lambda: 0 in outcomes)
    other = ChannelServer(encoder_service(second, tokenizer))
    encoders.update({"1": await other.start(NODE, "127.0.0.1")})
    await until(lambda: encoders.connected == 1)
    for connection in tuple(lost.connections):
        connection.abort()
    await call
    assert outcomes.keys() == {0, 1}
    assert fallback.calls == []
    encoders.close()
    await asyncio.gather(lost.close(1), other.close(1))


async def test_inspection_calls_are_answered(pools: Any, fallback: Fallback) -> None:
    client = ChannelTokenizerClient(pools[1], fallback)
    (tokens,) = await client.tokenize(TokenizeRequest(MODEL, ("abc",), special=True))
    assert tokens.ids.tolist() == [3]
    assert await client.decode(DecodeRequest(MODEL, ((97, 98),), skip_special=True)) == ("ab",)
    with pytest.raises(Overloaded):
        await client.tokenize(TokenizeRequest(ModelRef("other", ""), ("a",), special=True))


def generation(prompt: str) -> GenerationCall:
    return GenerationCall(MODEL, prompt, GenerationOptions(), deadline_after(10))


async def test_generation_is_answered_and_streamed(pools: Any, fallback: Fallback) -> None:
    client = ChannelGeneratorClient(pools[3], fallback)
    assert (await client.complete(generation("prompt"))).text == "prompt"
    assert [e async for e in client.stream(generation("prompt"))] == [STARTED, CHUNK, LAST]
    with pytest.raises(Overloaded):
        await client.complete(generation("full"))
    with pytest.raises(Overloaded):
        _ = [event async for event in client.stream(generation("full"))]
    assert fallback.calls == []


async def test_without_a_channel_handles_are_used(fallback: Fallback) -> None:
    empty = ReplicaPool("Fake", NODE)
    batch = CallBatch(KEY, (build_call("a"),))
    (outcome,) = await collect_outcomes(ChannelEncoderClient(empty, empty, fallback), batch)
    assert isinstance(outcome, CallResult)
    assert outcome.value == "fallback"
    tokenizer = ChannelTokenizerClient(empty, fallback)
    assert await tokenizer.decode(DecodeRequest(MODEL, ((1,),), skip_special=True)) == ("fallback",)
    assert await tokenizer.tokenize(TokenizeRequest(MODEL, ("a",), special=True)) == ()
    generator = ChannelGeneratorClient(empty, fallback)
    assert (await generator.complete(generation("a"))).text == "fallback"
    assert [event async for event in generator.stream(generation("a"))] == [STARTED]
    assert len(fallback.calls) == 5


async def test_encoder_without_a_channel_uses_handles(pools: Any, fallback: Fallback) -> None:
    batch = CallBatch(KEY, (build_call("a"),))
    empty = ReplicaPool("Fake", NODE)
    (outcome,) = await collect_outcomes(ChannelEncoderClient(pools[1], empty, fallback), batch)
    assert isinstance(outcome, CallResult)
    assert outcome.value == "fallback"
