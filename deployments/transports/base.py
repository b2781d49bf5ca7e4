"""The one thing the router needs of the other deployments."""

from __future__ import annotations

from typing import Protocol

from deployments.messages import CallBatch, Outcome


class LaneClient(Protocol):
    """Tokenizer and one lane, as one hop."""

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """One outcome per call, in order.

        Raises Overloaded when a waiting line on the way is full, EngineFailed when a replica was
        lost and the second try failed too.
        """
        ...
