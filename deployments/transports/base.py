"""Clients of the ingress for the other deployments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeVar

from deployments.errors import ServeError
from deployments.messages import (
    CallBatch,
    Chunk,
    Completion,
    DecodeRequest,
    GenerationCall,
    Outcome,
    Started,
    TextTokens,
    TokenizeRequest,
)

T = TypeVar("T")

# Takes the index and the outcome of a call as soon as it is known.
Deliver = Callable[[int, Outcome], None]


class EncoderClient(Protocol):
    """Tokenizer and one encoder as one hop."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        """Deliver the outcome of every call at least once, in any order, then return.

        Raises Overloaded if a queue is full, ReplicasLost if several replicas were lost.
        """
        ...


class TokenizerClient(Protocol):
    """The tokenizer alone. Raises like EncoderClient, and the ServeError of the request."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        """Return the tokens of each text, in order."""
        ...

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        """Return the text of each sequence, in order."""
        ...


class GeneratorClient(Protocol):
    """Generators of one kind of device. Raises ServeError."""

    async def complete(self, call: GenerationCall) -> Completion:
        """Return the whole answer. Cancelling releases the KV slot within one step."""
        ...

    def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Yield one Started, then chunks until one is finished. Closing releases the KV slot."""
        ...


def unwrap(outcome: T | ServeError) -> T:
    """Return the outcome of a replica, or raise it if it is an error."""
    if isinstance(outcome, ServeError):
        raise outcome
    return outcome
