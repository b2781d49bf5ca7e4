"""Interfaces of the clients by which the ingress calls the other deployments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from deployments.artifacts.types import Device
from deployments.errors import ServeError
from deployments.messages import (
    CallBatch,
    CallOutcome,
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

T = TypeVar("T")

# Callback that gets the index and outcome of each call, as soon as the outcome is known.
Deliver = Callable[[int, CallOutcome], None]


class EncoderClient(Protocol):
    """Client of the tokenizer and of one encoder deployment. `infer` uses both."""

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        """Deliver the outcome of every call at least once, in any order, then return.

        Raises a ServeError if all calls fail, or all calls that have no outcome yet: for example
        Overloaded if a queue is full, ReplicasLost if several replicas were lost, ReplicasSilent if
        no replica answers.
        """
        ...


class TokenizerClient(Protocol):
    """Client of the tokenizer alone, without an encoder. Methods raise the replica's ServeError."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        """Return the tokens of each text, in order."""
        ...

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        """Return the text of each sequence, in order."""
        ...


class GeneratorClient(Protocol):
    """Client of the generators on one kind of device. Methods raise the replica's ServeError."""

    async def complete(self, call: GenerationCall) -> Completion:
        """Return the whole answer. Cancelling releases the KV slot within one step."""
        ...

    def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Yield one Started, then chunks. The last chunk has `finished`.

        Closing the stream releases the KV slot.
        """
        ...

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...]:
        """Return the token ids of the call's prompt. Nothing is generated."""
        ...


class ModelPoolClient(Protocol):
    """Client for the models in the memory of all replicas of one deployment."""

    async def send(self, request: PoolRequest) -> Mapping[str, PoolState | ServeError]:
        """Send the request to every replica; return the outcomes that arrive, by replica id."""
        ...

    def has_model(self, model: ModelRef) -> bool:
        """Return whether a replica has the model in its memory.

        Over channels, the answer is about the replicas to which this process is connected. Ray
        Serve handles do not report models, so over handles the answer is always True.
        """
        ...


def unwrap(outcome: T | ServeError) -> T:
    """Return the outcome of a replica, or raise the outcome if it is an error."""
    if isinstance(outcome, ServeError):
        raise outcome
    return outcome


class Clients(NamedTuple):
    """The clients through which the ingress calls the other deployments."""

    tokenizer: TokenizerClient
    encoders: Mapping[Device, EncoderClient]
    generators: Mapping[Device, GeneratorClient]
    model_pools: Mapping[str, ModelPoolClient]  # by deployment
