"""Encoder engines that the replica and its running passes share."""

from __future__ import annotations

import weakref

from deployments.engines.base import EncoderEngine
from deployments.engines.forward_pass import Batch, Outputs


class SharedEngine:
    """An EncoderEngine that is closed as soon as nothing refers to it: no replica and no pass.

    Without `close`, the memory of a replaced engine would wait for a garbage collection, which is
    rare, because the programs of torch refer to themselves.
    """

    def __init__(self, engine: EncoderEngine) -> None:
        self.info = engine.info
        self._engine = engine
        self._close = weakref.finalize(self, engine.close)
        self._close.atexit = False  # the end of the process releases the memory

    def run(self, batch: Batch) -> Outputs:
        return self._engine.run(batch)

    def close(self) -> None:
        """Close the engine now, although something refers to it. No pass may use it."""
        self._close()
