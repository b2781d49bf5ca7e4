"""Scripted replicas with channels (direct connections), and a client without channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from deployments.artifacts.types import Device, TaskName
from deployments.deadlines import deadline_after
from deployments.errors import InvalidField, Overloaded, ServeError
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    CallOutcome,
    CallResult,
    Chunk,
    Completion,
    DecodeRequest,
    Finished,
    FinishReason,
    GenerationCall,
    GenerationTimings,
    ModelRef,
    Started,
    TextTokens,
    TokenizedBatch,
    TokenizedCall,
    TokenizeRequest,
    Truncation,
)
from deployments.tasks.embedding import EmbeddingOptions
from deployments.transports.base import Deliver
from deployments.transports.channel.replica_connections import ReplicaConnections
from deployments.transports.channel.server import ChannelServer, Service
from tests.support.channels import NODE, until

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
    """Tokenizer for scripted calls.

    `tokenize_batch` returns one token per character, and an error for the text `too long`.
    `tokenize` returns the length of each text as its only token, and an error for models other than
    MODEL.
    """

    pool = None

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
    """Encoder that returns the sum of the token ids of each item.

    All answers wait while `may_answer` is cleared. The answers after the first result wait while
    `may_continue` is cleared.
    """

    pool = None

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_continue = asyncio.Event()
        self.may_continue.set()

    async def stream(self, batch: TokenizedBatch) -> AsyncGenerator[dict[int, CallOutcome], None]:
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


class EchoGenerator:
    pool = None

    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        if call.prompt == "full":
            return Overloaded("full")
        assert LAST.finished is not None
        return Completion(STARTED, str(call.prompt), (), LAST.finished)

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...] | ServeError:
        return Overloaded("full") if call.prompt == "full" else tuple(map(ord, str(call.prompt)))

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
    """Client without channels for every kind of replica. It records the calls."""

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

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...]:
        self.calls.append(call)
        return ()

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        self.calls.append(call)
        yield STARTED


@asynccontextmanager
async def pool_of(service: Service) -> AsyncIterator[ReplicaConnections]:
    server, pool = ChannelServer(service), ReplicaConnections("Fake", NODE)
    pool.update({"0": await server.start(NODE, "127.0.0.1")})
    await until(lambda: pool.connected == 1)
    try:
        yield pool
    finally:
        pool.close()
        await server.close(1)
