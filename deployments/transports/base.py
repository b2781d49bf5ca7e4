"""What the ingress needs of the other deployments."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.generation.messages import Chunk, Completion, GenerationCall, Started
from deployments.messages import (
    CallBatch,
    DecodeRequest,
    Outcome,
    TextTokens,
    TokenizeRequest,
)


class EncoderClient(Protocol):
    """Tokenizer and one encoder, as one hop."""

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """One outcome per call, in order.

        Raises Overloaded when a waiting line on the way is full, EngineFailed when a replica was
        lost and the second try failed too.
        """
        ...


class TokenizerClient(Protocol):
    """The tokenizer by itself. Raises as EncoderClient does, and what its answer is when an error."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        """The tokens of each text, in order."""
        ...

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        """The text of each sequence, in order."""
        ...


class GeneratorClient(Protocol):
    """A generator of one kind of device. Raises ServeError."""

    async def complete(self, call: GenerationCall) -> Completion:
        """The whole answer; a cancelled caller's slot is free within one step."""
        ...

    def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """One Started, then chunks until one is finished; closing it frees the slot."""
        ...
