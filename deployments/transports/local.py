"""Tokenizer and lane in this process: the whole path without Ray, for tests and tools."""

from __future__ import annotations

from deployments.errors import ServeError
from deployments.messages import (
    CallBatch,
    DecodeRequest,
    Outcome,
    TextTokens,
    TokenizeRequest,
)
from deployments.replicas.lane import BatchReplica
from deployments.replicas.tokenizer import TokenizerReplica


class LocalLaneClient:
    """A LaneClient over plain objects."""

    def __init__(self, tokenizer: TokenizerReplica, lane: BatchReplica) -> None:
        self._tokenizer = tokenizer
        self._lane = lane

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """Encode, then run."""
        return await self._lane.infer(await self._tokenizer.encode(batch))


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
