"""Tokenizer and encoder in this process: the whole path without Ray, for tests and tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.errors import ServeError
from deployments.generation.messages import Chunk, Completion, GenerationCall, Started
from deployments.messages import (
    CallBatch,
    DecodeRequest,
    Outcome,
    TextTokens,
    TokenizeRequest,
)
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.tokenizer import TokenizerReplica


class LocalEncoderClient:
    """A EncoderClient over plain objects."""

    def __init__(self, tokenizer: TokenizerReplica, encoder: EncoderReplica) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """Encode, then run."""
        return await self._encoder.infer(await self._tokenizer.tokenize_batch(batch))


class LocalTokenizerClient:
    """A TokenizerClient over a plain object."""

    def __init__(self, tokenizer: TokenizerReplica) -> None:
        self._tokenizer = tokenizer

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        """Ask it."""
        outcome = await self._tokenizer.tokenize(request)
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        """Ask it."""
        outcome = await self._tokenizer.decode(request)
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome


class LocalGeneratorClient:
    """A GeneratorClient over a plain object."""

    def __init__(self, generator: GeneratorReplica) -> None:
        self._generator = generator

    async def complete(self, call: GenerationCall) -> Completion:
        """Ask it."""
        outcome = await self._generator.complete(call)
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Ask it."""
        async with aclosing(self._generator.stream(call)) as stream:
            async for news in stream:
                if isinstance(news, ServeError):
                    raise news
                yield news
