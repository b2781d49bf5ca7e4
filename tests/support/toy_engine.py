"""An engine in one file. The encoder has a constant output; decoders look logits up in a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines import EngineInfo, EngineKind, GraphSpec
from deployments.engines.decoder import DecoderInfo, DecoderSpec, Logits, TokenColumn
from deployments.engines.forward_pass import Batch, Outputs
from tests.support.artifacts import WIDTH

AXIS = 3  # the toy encoder returns the unit vector along this axis for every item


class ToyEncoder:
    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self.info = EngineInfo(spec.compute_type)

    def run(self, batch: Batch) -> Outputs:
        vector = np.eye(WIDTH, dtype=np.float32)[AXIS]
        return Outputs([vector] * len(batch.lengths))

    def close(self) -> None: ...


class ToyDecoder:
    """Decoder that predicts from the last token only. By default it repeats this token."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        self._logits = self.load(spec)  # [V, V]: logits of the next token, by last token

    def load(self, spec: DecoderSpec) -> Logits:
        return np.eye(spec.vocabulary, dtype=np.float32)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        logits = self._predict(ids)
        return logits if all_logits else logits[-1]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        return self._predict(ids)

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        return self._predict(ids)

    def copy(self, source: int, target: int, tokens: int) -> None: ...

    def swap(self, first: int, second: int, tokens: int) -> None: ...

    def close(self) -> None: ...

    def _predict(self, ids: Sequence[int] | TokenColumn) -> Logits:
        return self._logits[np.asarray(ids)]


class BigramDecoder(ToyDecoder):
    """Decoder that reads its logits table from the graph file, a NumPy array."""

    def load(self, spec: DecoderSpec) -> Logits:
        return np.load(spec.path)


TOY = EngineKind(packages=(), open_encoder=ToyEncoder, open_decoder=ToyDecoder)
BIGRAMS = EngineKind(packages=(), open_decoder=BigramDecoder)
