"""The CUDA graphs of a decoder: one for each key, captured at its first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from deployments.engines.pytorch.capture import (
    CapturedCall,
    CaptureFailed,
    EngineGraphs,
    capture,
)
from deployments.engines.pytorch.capture_lock import CaptureLock

log = logging.getLogger("ray.serve.hundredfold")

# Limit of the CUDA graphs of one decoder. Each took 10 MB of GPU memory with SmolLM2-135M
# (docs/results/gpu.json), and no setting counts this memory. The usual settings of a GPU, 32 slots
# of 4,096 tokens, have 185 keys.
MAX_GRAPHS = 256


class CapturedCalls:
    """The CUDA graphs of a decoder, by key: (slots, kv_length), or (1, kv_length, tokens)."""

    def __init__(self, lock: CaptureLock) -> None:
        self.calls: dict[tuple[int, ...], CapturedCall] = {}
        self._graphs = EngineGraphs()
        self._lock = lock
        self._uncaptured: set[tuple[int, ...]] = set()  # keys whose capture failed

    def find(
        self,
        key: tuple[int, ...],
        call: Callable[[], None],
        restored: Callable[[], AbstractContextManager[None]],
    ) -> Callable[[], None]:
        """Return a function that has the effect of `call` by replaying its CUDA graph.

        The first use captures the graph, within `restored()`. While a model is being opened, return
        `call` itself, so that a later use captures. Two captures wait for openings instead: the
        first of a prefill and the first of a decode step, which may compile. Both run while this
        decoder is opened, so no request waits for them. If a capture fails, return `call`, also
        for all later uses of the key; and for new keys once there are MAX_GRAPHS graphs.
        """
        captured = self.calls.get(key) or self._capture(key, call, restored)
        return call if captured is None else captured.replay

    def clear(self) -> None:
        """Drop all graphs."""
        self.calls.clear()
        self._graphs.drop()

    def give_back_stream(self) -> None:
        """Let other engines use the stream of the graphs. Call this once no graph exists."""
        self._graphs.give_back_stream()

    def _capture(
        self,
        key: tuple[int, ...],
        call: Callable[[], None],
        restored: Callable[[], AbstractContextManager[None]],
    ) -> CapturedCall | None:
        if key in self._uncaptured or len(self.calls) >= MAX_GRAPHS:
            return None
        tried = (*self.calls, *self._uncaptured)
        is_first = not any(len(other) == len(key) for other in tried)
        if not is_first and self._lock.is_opening:  # the capture would wait for the opening
            return None
        try:
            with restored():
                captured = capture(call, self._graphs, self._lock, waits=is_first)
        except CaptureFailed:  # it is logged
            self._uncaptured.add(key)
            return None
        if captured is not None:
            self.calls[key] = captured
            if len(self.calls) == MAX_GRAPHS:
                log.info("a decoder has %d CUDA graphs; other calls run uncaptured", MAX_GRAPHS)
        return captured
