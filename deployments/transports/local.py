"""Tokenizer and lane in this process: the whole path without Ray, for tests and tools."""

from __future__ import annotations

from deployments.messages import CallBatch, Outcome
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
