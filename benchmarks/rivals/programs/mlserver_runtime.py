"""MLServer runtime that calls an embedding function. `model-settings.json` configures it."""

from __future__ import annotations

from pathlib import Path

from embedders import open_embedder
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class EmbeddingRuntime(MLModel):
    """Runtime with one BYTES input of texts and one FP32 output [texts, width]."""

    async def load(self) -> bool:
        extra = self.settings.parameters.extra
        tokenizer = Path(extra["tokenizer"])
        self._embed = open_embedder(extra["engine"], Path(extra["model"]), tokenizer)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("embeddings", self._embed(texts))
        return InferenceResponse(model_name=self.name, outputs=[output])
