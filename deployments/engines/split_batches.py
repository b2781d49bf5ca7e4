"""Engine that splits batches whose intermediate results would take too much memory."""

from __future__ import annotations

from deployments.engines.base import EncoderEngine
from deployments.engines.forward_pass import Batch, Outputs


class SplittingEngine:
    """An EncoderEngine that runs batches of more than `max_tokens` padded tokens in halves.

    An item that exceeds `max_tokens` alone is not split.
    """

    def __init__(self, engine: EncoderEngine, max_tokens: int) -> None:
        self.info = engine.info
        self._engine = engine
        self._max_tokens = max_tokens

    def run(self, batch: Batch) -> Outputs:
        if batch.input_ids.size <= self._max_tokens or len(batch.lengths) == 1:
            return self._engine.run(batch)
        return Outputs([item for half in batch.halves() for item in self.run(half).items])

    def close(self) -> None:
        self._engine.close()
