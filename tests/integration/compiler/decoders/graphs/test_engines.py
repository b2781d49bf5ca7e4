"""Exported graphs of decoders and encoder-decoders in the server's ONNX Runtime engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from deployments.artifacts.generation_config import EncoderDecoderConfig, GenerationConfig
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from tests.integration.compiler.decoders.graphs.conftest import ExportedCase, ExportModel
from tests.support.tiny_checkpoints import POSITIONS

NEAR = 1e-4
SOURCES = ([7, 8, 9, 30, 31, 41, 5], [50], [21, 9, 33, 70, 6, 11, 64, 65, 12])


@contextmanager
def opened(exported: ExportedCase) -> Iterator[DecoderEngine]:
    written = exported.written
    source = None
    if written.encoder is not None:
        start = exported.model.generation_config.decoder_start_token_id
        source = EncoderDecoderConfig(max_source_tokens=20, decoder_start_token_id=start)
    spec = DecoderSpec(
        path=written.decoder,
        encoder=written.encoder,
        device=Device.CPU,
        precision="fp32",
        options=EngineOptions(),
        generation_config=GenerationConfig(
            layers=written.layers,
            kv_heads=written.kv_heads,
            head_dim=written.head_dim,
            eos_token_ids=written.eos_token_ids,
            encoder_decoder=source,
        ),
        vocabulary=written.vocabulary,
        max_tokens=POSITIONS,
    )
    engine = open_decoder(spec, GeneratorSettings(kv_slots=3))
    try:
        yield engine
    finally:
        engine.close()


def reference_logits(exported: ExportedCase, source: list[int], answer: list[int]) -> np.ndarray:
    """Return transformers' logits after the last token of `answer`."""
    feeds = {"input_ids": torch.tensor([[*source, *answer]])}
    if exported.written.encoder is not None:
        start = exported.model.generation_config.decoder_start_token_id
        feeds = {
            "input_ids": torch.tensor([source]),
            "decoder_input_ids": torch.tensor([[start, *answer]]),
        }
    with torch.no_grad():
        return exported.model(**feeds).logits[0, -1].numpy()


@pytest.mark.parametrize("name", ["gpt2", "bart", "marian", "t5"])
def test_engine_runs_prefill_decode_and_copy(exported: ExportModel, name: str) -> None:
    model = exported(name)
    with opened(model) as engine:
        lengths = np.zeros(3, np.int64)
        for row, source in enumerate(SOURCES):
            logits = engine.prefill(row, source, 0)
            np.testing.assert_allclose(logits, reference_logits(model, source, []), atol=NEAR)
            lengths[row] = len(source) if model.written.encoder is None else 1
        logits = engine.decode(np.array([40, 41, 42]), lengths)
        for row, source in enumerate(SOURCES):
            expected = reference_logits(model, source, [40 + row])
            np.testing.assert_allclose(logits[row], expected, atol=NEAR)
        engine.copy(0, 2, int(lengths[0]) + 1)
        lengths = lengths[[0, 1, 0]] + 1
        logits = engine.decode(np.array([60, 61, 62]), lengths)
        for row, token in ((0, 60), (2, 62)):
            expected = reference_logits(model, SOURCES[0], [40, token])
            np.testing.assert_allclose(logits[row], expected, atol=NEAR)
