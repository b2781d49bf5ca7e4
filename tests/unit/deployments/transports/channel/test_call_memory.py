"""Refused calls leave the memory of client and replica without a garbage collection."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from deployments.deadlines import deadline_after
from deployments.errors import EngineFailed, InvalidField, ServeError, forget_frames
from deployments.messages import (
    CallBatch,
    CallOutcome,
    GenerationCall,
    GenerationOptions,
    TokenizedBatch,
)
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.deployment_clients import (
    ChannelEncoderClient,
    ChannelGeneratorClient,
)
from deployments.transports.channel.frames import CallFrame
from deployments.transports.channel.services import (
    encoder_service,
    generator_service,
    tokenizer_service,
)
from tests.support.channel_replicas import (
    KEY,
    MODEL,
    EchoGenerator,
    FakeEncoder,
    FakeTokenizer,
    Fallback,
    build_call,
    pool_of,
)
from tests.support.channels import send, until
from tests.support.fakes import wait_until
from tests.unit.deployments.transports.channel.test_refusals import (
    FULL,
    LostReplica,
    RefusingReplica,
    pool_over,
)

CALLS = 3

# The garbage collector would hide objects that leave by it only.
pytestmark = pytest.mark.usefixtures("no_collection")


def count_calls() -> int:
    kinds = CallFrame, ChannelRequest, ServeError
    return sum(isinstance(each, kinds) for each in gc.get_objects())


async def check_that_calls_leave(run: Callable[[], Awaitable[object]]) -> None:
    """Run several calls. Forget the frames of their errors, as the ingress does."""
    before = count_calls()
    for _ in range(CALLS):
        try:
            await run()
        except ServeError as error:
            forget_frames(error)
    await wait_until(lambda: count_calls() == before)


async def test_generation_that_the_replica_refuses() -> None:
    call = GenerationCall(MODEL, "full", GenerationOptions(), deadline_after(10))

    async def read_stream() -> None:
        async for _event in client.stream(call):
            pass

    async with pool_of(generator_service(EchoGenerator())) as pool:
        client = ChannelGeneratorClient(pool, Fallback())
        await check_that_calls_leave(lambda: client.complete(call))
        await check_that_calls_leave(read_stream)


class BrokenTokenizer(FakeTokenizer):
    async def tokenize_batch(self, batch: CallBatch) -> TokenizedBatch:
        error = EngineFailed("broken")
        raise error


class RejectingEncoder(FakeEncoder):
    """Encoder in which all calls fail, each with an error that is raised and caught."""

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, CallOutcome], None]:
        for index in range(len(batch.calls)):
            yield {index: self._fail()}

    def _fail(self) -> ServeError:
        failure = InvalidField("wrong", field="inputs")
        try:
            raise failure
        except ServeError as error:
            return error


@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), BrokenTokenizer()], ids=["encoder", "both"])
async def test_texts_that_fail_in_the_replica(tokenizer: FakeTokenizer) -> None:
    batch = CallBatch(KEY, (build_call("text"), build_call("other")))
    async with (
        pool_of(tokenizer_service(tokenizer)) as tokenizers,
        pool_of(encoder_service(RejectingEncoder(), tokenizer)) as encoders,
    ):
        client = ChannelEncoderClient(tokenizers, encoders, Fallback())
        await check_that_calls_leave(lambda: client.infer(batch, lambda _index, _outcome: None))


@pytest.mark.parametrize("kind", [RefusingReplica, LostReplica], ids=["refused", "lost"])
async def test_call_that_another_replica_answers(kind: type[RefusingReplica]) -> None:
    first, other = kind(FULL), RefusingReplica()
    async with pool_over(first.server, other.server) as pool:

        async def send_once_connected() -> None:
            await until(lambda: pool.connected == 2)
            assert await send(pool, b"call") == b"answer"

        await check_that_calls_leave(send_once_connected)
    assert first.calls
