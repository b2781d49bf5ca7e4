"""Clients of replicas in the same process: the whole request path without Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from deployments.errors import ServeError
from deployments.messages import (
    CallBatch,
    Chunk,
    Completion,
    DecodeRequest,
    GenerationCall,
    ModelRef,
    PoolRequest,
    PoolState,
    Started,
    TextTokens,
    TokenizeRequest,
)
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.transports.base import Deliver, unwrap


class LocalEncoderClient:
    def __init__(self, tokenizer: TokenizerReplica, encoder: EncoderReplica) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        tokenized = await self._tokenizer.tokenize_batch(batch)
        async with aclosing(self._encoder.stream(tokenized)) as parts:
            async for outcomes in parts:
                for index, outcome in outcomes.items():
                    deliver(index, outcome)


class LocalTokenizerClient:
    def __init__(self, tokenizer: TokenizerReplica) -> None:
        self._tokenizer = tokenizer

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        return unwrap(await self._tokenizer.tokenize(request))

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        return unwrap(await self._tokenizer.decode(request))


class LocalGeneratorClient:
    def __init__(self, generator: GeneratorReplica) -> None:
        self._generator = generator

    async def complete(self, call: GenerationCall) -> Completion:
        return unwrap(await self._generator.complete(call))

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        async with aclosing(self._generator.stream(call)) as stream:
            async for event in stream:
                if isinstance(event, ServeError):
                    raise event
                yield event

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...]:
        return unwrap(await self._generator.tokenize_prompt(call))


class LocalModelPoolClient:
    """A ModelPoolClient of one or several replicas of one kind, by name."""

    def __init__(self, replicas: Mapping[str, EncoderReplica | GeneratorReplica]) -> None:
        self._replicas = replicas

    async def send(self, request: PoolRequest) -> Mapping[str, PoolState | ServeError]:
        states: dict[str, PoolState | ServeError] = {}
        for name, replica in self._replicas.items():
            try:
                states[name] = await replica.pool.apply(request)
            except ServeError as error:
                states[name] = error
        return states

    def has_model(self, model: ModelRef) -> bool:
        return any(model in replica.pool for replica in self._replicas.values())
