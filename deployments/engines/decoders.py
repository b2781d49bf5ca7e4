"""Opening a decoder: which engine, and how many rows the memory is enough for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deployments.config import GeneratorSettings
from deployments.decoding import Decoding
from deployments.engines.decoder import Decoder, DecoderSpec
from deployments.errors import EngineFailed

WARM_UP_TOKENS = 32
_VALUE_BYTES = {"fp16": 2, "bf16": 2}  # of a key or a value; 4 in all other precisions


def open_decoder(spec: DecoderSpec, settings: GeneratorSettings) -> Decoder:
    """The decoder, its memory set aside. Raises EngineFailed."""
    from deployments.engines.onnx_decoder import OnnxDecoder
    from deployments.engines.onnx_encoder_decoder import OnnxEncoderDecoder

    context = min(settings.context_tokens, spec.most_tokens)
    source = 0 if spec.decoding.source is None else spec.decoding.source.source_tokens
    value_bytes = _VALUE_BYTES.get(spec.precision, 4)
    row_bytes = (context + source) * token_bytes(spec.decoding, value_bytes)
    rows = min(settings.rows, settings.memory_bytes // row_bytes)
    if not rows:
        raise EngineFailed(
            f"{spec.path.name}: a context of {context} tokens takes {row_bytes} bytes of memory, "
            f"`memory_bytes` is {settings.memory_bytes}"
        )
    # A step is hundreds of small operators, between which a thread that sleeps wakes too late: a
    # third of the time of a step for one row.
    spec = replace(spec, options=spec.options.model_copy(update={"spinning": True}))
    engine = OnnxDecoder if spec.decoding.source is None else OnnxEncoderDecoder
    decoder = engine(spec, settings, rows=rows, context=context)
    _warm_up(decoder)
    return decoder


def _warm_up(decoder: Decoder) -> None:
    """Do once what is slow the first time, before somebody waits for it.

    Weights are laid out and memory is touched; the calls for each number of rows are bound.
    """
    info = decoder.info
    decoder.prefill(0, [0] * min(WARM_UP_TOKENS, info.source_tokens or info.context - 1), 0)
    for rows in range(1, info.rows + 1):
        decoder.decode(np.zeros(rows, np.int64), np.ones(rows, np.int64))


def token_bytes(decoding: Decoding, value_bytes: int) -> int:
    """What the memory of one token takes, in all layers."""
    return 2 * decoding.layers * decoding.kv_heads * decoding.head_dim * value_bytes
