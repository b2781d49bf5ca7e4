"""Channel clients with real sockets to scripted replicas, and their fallback to Serve handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import ArtifactMissing, InvalidField, Overloaded, ServeError
from deployments.messages import (
    BeamSearchParams,
    CallBatch,
    CallOutcome,
    CallResult,
    Completion,
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    LoadedModel,
    ModelRef,
    PoolRequest,
    PoolState,
    Prompt,
    TokenizeRequest,
)
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.deployment_clients import (
    LONE_CALL_CHARACTERS,
    LONG_ANSWER_TOKENS,
    ChannelEncoderClient,
    ChannelGeneratorClient,
    ChannelModelPoolClient,
    ChannelTokenizerClient,
)
from deployments.transports.channel.frames import AnswerFrame
from deployments.transports.channel.replica_connections import NoChannel, ReplicaConnections
from deployments.transports.channel.server import ChannelServer
from deployments.transports.channel.services import (
    encoder_service,
    generator_service,
    tokenizer_service,
)
from tests.support.channel_replicas import (
    CHUNK,
    KEY,
    LAST,
    MODEL,
    STARTED,
    EchoGenerator,
    FakeEncoder,
    FakeTokenizer,
    Fallback,
    build_call,
    pool_of,
)
from tests.support.channels import NODE, call, connected_pool, running_replica, until
from tests.support.fakes import collect_outcomes


@pytest.fixture
def fallback() -> Fallback:
    return Fallback()


@pytest.fixture
async def pools() -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        encoder: Any = FakeEncoder()
        tokenizer: Any = FakeTokenizer()
        generator: Any = EchoGenerator()
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


async def test_deadline_of_a_call_reaches_the_replica() -> None:
    deadline_s = deadline_after(1_000)
    async with running_replica() as replica, connected_pool(replica) as pool:
        await pool.call(call(b"echo")._replace(deadline_s=deadline_s))
        assert replica.replica.deadlines == [pytest.approx(deadline_s, abs=10.0)]


async def test_idle_encoder_tokenizes_a_short_call_itself(fallback: Fallback) -> None:
    encoder: Any = FakeEncoder()
    shared: Any = FakeTokenizer()
    own: Any = FakeTokenizer()
    async with (
        pool_of(tokenizer_service(shared)) as tokenizers,
        pool_of(encoder_service(encoder, own)) as encoders,
    ):
        client = ChannelEncoderClient(tokenizers, encoders, fallback)

        def send(text: str) -> asyncio.Task[list[CallOutcome]]:
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


async def test_calls_with_and_without_tokens_cost_the_same_unit(fallback: Fallback) -> None:
    encoder: Any = FakeEncoder()
    own: Any = FakeTokenizer()
    async with pool_of(encoder_service(encoder, own)) as encoders:
        client = ChannelEncoderClient(encoders, encoders, fallback)
        encoder.may_answer.clear()
        batch = CallBatch(KEY, (build_call("a" * 401),))
        call = asyncio.create_task(collect_outcomes(client, batch))
        await until(lambda: own.batches == 1)
        assert [connection.pending_cost for connection in encoders.connections()] == [101]
        encoder.may_answer.set()
        await call


async def test_encoder_tokenizes_while_no_tokenizer_answers(fallback: Fallback) -> None:
    encoder: Any = FakeEncoder()
    shared: Any = FakeTokenizer()
    own: Any = FakeTokenizer()
    batch = CallBatch(KEY, (build_call("a" * (LONE_CALL_CHARACTERS + 1)),))
    async with pool_of(encoder_service(encoder, own)) as encoders:
        async with pool_of(tokenizer_service(shared)) as tokenizers:
            client = ChannelEncoderClient(tokenizers, encoders, fallback)
            await collect_outcomes(client, batch)
        for pool in (tokenizers, ReplicaConnections("Fake", NODE)):
            client = ChannelEncoderClient(pool, encoders, fallback)
            (outcome,) = await collect_outcomes(client, batch)
            assert isinstance(outcome, CallResult)
    assert (own.batches, shared.batches) == (2, 1)
    assert fallback.calls == []


async def test_outcomes_arrive_before_the_last_is_known(pools: Any, fallback: Fallback) -> None:
    encoder, tokenizers, encoders, _ = pools
    encoder.may_continue.clear()
    outcomes: dict[int, CallOutcome] = {}
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
    outcomes: dict[int, CallOutcome] = {}
    batch = CallBatch(KEY, (build_call("a"), build_call("b")))
    tokenizer: Any = FakeTokenizer()
    lost = ChannelServer(encoder_service(first, tokenizer))
    encoders = ReplicaConnections("Fake", NODE)
    encoders.update({"0": await lost.start(NODE, "127.0.0.1")})
    await until(lambda: encoders.connected == 1)
    client = ChannelEncoderClient(ReplicaConnections("Fake", NODE), encoders, fallback)
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
    assert await client.tokenize_prompt(generation("ab")) == (97, 98)
    with pytest.raises(Overloaded):
        await client.tokenize_prompt(generation("full"))
    assert fallback.calls == []


def limited(prompt: Prompt, tokens: int | None, **options: Any) -> GenerationCall:
    chosen = GenerationOptions(max_new_tokens=tokens, **options)
    return generation("")._replace(prompt=prompt, options=chosen)


@pytest.mark.parametrize(
    ("call", "tokens"),
    [
        pytest.param(limited("x" * 400, 20), 120, id="text"),
        pytest.param(limited(tuple(range(400)), 20), 420, id="token ids"),
        pytest.param(limited("", None), LONG_ANSWER_TOKENS, id="no limit"),
        pytest.param(limited("", 10**9), LONG_ANSWER_TOKENS, id="high limit"),
        pytest.param(limited("", 20, beam_search=BeamSearchParams(3)), 60, id="beams"),
        pytest.param(limited("", 20, beam_search=BeamSearchParams(10**7)), 1_280, id="many beams"),
        pytest.param(limited("", 0), 1, id="nothing"),
    ],
)
async def test_generations_cost_tokens(
    fallback: Fallback, call: GenerationCall, tokens: int
) -> None:
    pool = RecordingPool()
    await ChannelGeneratorClient(cast(Any, pool), fallback).complete(call)
    assert pool.costs == [tokens]


async def test_count_of_tokens_costs_the_prompt_alone(fallback: Fallback) -> None:
    pool = RecordingPool()
    await ChannelGeneratorClient(cast(Any, pool), fallback).tokenize_prompt(
        limited("x" * 400, None)
    )
    assert pool.costs == [100]


class RecordingPool:
    """Pool without a channel that records the costs of the calls."""

    def __init__(self) -> None:
        self.costs: list[int] = []

    async def call(self, request: ChannelRequest) -> AnswerFrame:
        self.costs.append(request.cost)
        raise NoChannel


async def test_short_generations_avoid_the_replica_with_a_long_one(fallback: Fallback) -> None:
    generators = [HoldingGenerator() for _ in range(2)]
    async with AsyncExitStack() as stack:
        endpoints = {}
        for index, generator in enumerate(generators):
            replica: Any = generator
            server = ChannelServer(generator_service(replica))
            stack.push_async_callback(server.close, 1)
            endpoints[str(index)] = await server.start(NODE, "127.0.0.1")
        pool = ReplicaConnections("Fake", NODE)
        stack.callback(pool.close)
        pool.update(endpoints)
        await until(lambda: pool.connected == 2)
        client = ChannelGeneratorClient(pool, fallback)
        calls = [limited("long", None), *(limited("short", 8) for _ in range(4))]
        tasks = [asyncio.create_task(client.complete(one)) for one in calls]
        await until(lambda: sum(len(one.prompts) for one in generators) == 5)
        prompts = [one.prompts for one in generators]
        assert sorted(prompts) == [["long"], ["short"] * 4]
        for generator in generators:
            generator.may_answer.set()
        await asyncio.gather(*tasks)
        assert all(connection.cost_in_flight == 0 for connection in pool.connections())


async def test_without_a_channel_handles_are_used(fallback: Fallback) -> None:
    empty = ReplicaConnections("Fake", NODE)
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
    assert await generator.tokenize_prompt(generation("a")) == ()
    assert len(fallback.calls) == 6


async def test_encoder_without_a_channel_uses_handles(pools: Any, fallback: Fallback) -> None:
    batch = CallBatch(KEY, (build_call("a"),))
    empty = ReplicaConnections("Fake", NODE)
    (outcome,) = await collect_outcomes(ChannelEncoderClient(pools[1], empty, fallback), batch)
    assert isinstance(outcome, CallResult)
    assert outcome.value == "fallback"


class HoldingGenerator(EchoGenerator):
    """Generator that records the prompts, and answers once `may_answer` is set."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.may_answer = asyncio.Event()

    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        self.prompts.append(call.prompt)
        await self.may_answer.wait()
        return await super().complete(call)


class RecordingModelPool:
    """Recorder of requests. Loading the model `absent` fails; other models count as loaded."""

    def __init__(self) -> None:
        self.requests: list[PoolRequest] = []

    async def apply(self, request: PoolRequest) -> PoolState:
        self.requests.append(request)
        if request.model is not None and request.model.id == "absent":
            raise ArtifactMissing("no such files")
        models = (LoadedModel(request.model, 5, True, 0, 3, 9.5, 0.5),) if request.model else ()
        return PoolState(models, 5, 10)


async def test_pools_of_all_replicas_are_managed() -> None:
    replicas = [(FakeEncoder(), RecordingModelPool()) for _ in range(2)]
    tokenizer, tokenizer_pool = FakeTokenizer(), RecordingModelPool()
    vars(tokenizer)["pool"] = tokenizer_pool
    async with AsyncExitStack() as stack:
        endpoints = {}
        for index, (replica, fake_pool) in enumerate(replicas):
            vars(replica)["pool"] = fake_pool
            encoder: Any = replica
            inner: Any = tokenizer
            server = ChannelServer(encoder_service(encoder, inner)._replace(pool=None))
            stack.push_async_callback(server.close, 1)
            endpoints[str(index)] = await server.start(NODE, "127.0.0.1")
        pool = ReplicaConnections("Fake", NODE)
        stack.callback(pool.close)
        client = ChannelModelPoolClient(pool)
        assert await client.send(PoolRequest("list")) == {}, "nothing is connected"
        pool.update(endpoints)
        await until(lambda: pool.connected == 2)
        ref = ModelRef("acme/tiny", "0123456789ab")
        states = await client.send(PoolRequest("load", ref))
        loaded = PoolState((LoadedModel(ref, 5, True, 0, 3, 9.5, 0.5),), 5, 10)
        assert states == {"0": loaded, "1": loaded}
        failed = await client.send(PoolRequest("load", ModelRef("absent", "0")))
        assert {type(error) for error in failed.values()} == {ArtifactMissing}
    for _, fake_pool in replicas:
        assert len(fake_pool.requests) == 1, "its tokenizer had no such model"
    assert len(tokenizer_pool.requests) == 4, "two requests for the tokenizer of each encoder"
