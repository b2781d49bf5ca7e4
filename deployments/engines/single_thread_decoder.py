"""A decoder whose calls all run on one thread (engine_thread.py).

A replica opens and warms up a decoder on one thread and generates on another. ONNX Runtime stores
CUDA graphs per thread, so generation on another thread could not replay those of the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.engines.decoder import DecoderEngine, Logits, TokenColumn
from deployments.engines.engine_thread import EngineThread


class SingleThreadDecoder:
    """Decoder engine that passes all calls to the thread that opened the decoder."""

    def __init__(self, open_decoder: Callable[[], DecoderEngine]) -> None:
        self._thread = EngineThread("decoder")
        try:
            self._decoder = self._thread.call(open_decoder)
        except BaseException:
            self._thread.close()
            raise
        self._is_open = True
        self.info = self._decoder.info

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        return self._thread.call(self._decoder.prefill, slot, ids, start, all_logits=all_logits)

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        return self._thread.call(self._decoder.decode, ids, lengths)

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        return self._thread.call(self._decoder.verify, slot, ids, start)

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._thread.call(self._decoder.copy, source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        self._thread.call(self._decoder.swap, first, second, tokens)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._thread.call(self._decoder.close)
            self._thread.close()
