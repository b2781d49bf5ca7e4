"""Opening a decoder: which engine, and how many rows the memory is enough for."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from deployments.config import GeneratorSettings, HardwareSettings
from deployments.decoding import Decoding
from deployments.engines.decoder import Decoder, DecoderSpec
from deployments.errors import EngineFailed
from deployments.manifest import ArtifactManifest, Candidate, Device, EngineName

WARM_UP_TOKENS = 32
_HALVES = ("fp16", "bf16")


class Opening(Protocol):
    """An engine, which is what opens a decoder."""

    def __call__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, rows: int, context: int
    ) -> Decoder:
        """The decoder, with memory for `rows` of `context` tokens. Raises EngineFailed."""
        ...


def open_decoder(spec: DecoderSpec, settings: GeneratorSettings) -> Decoder:
    """The decoder, its memory set aside. Raises EngineFailed."""
    if reason := lacking(spec.engine, settings):
        raise EngineFailed(f"{spec.path.name}: {reason}")
    context = min(settings.context_tokens, spec.most_tokens)
    source = 0 if spec.decoding.source is None else spec.decoding.source.source_tokens
    row_bytes = (context + source) * token_bytes(spec.decoding, _value_bytes(spec))
    rows = min(settings.rows, settings.memory_bytes // row_bytes)
    if not rows:
        raise EngineFailed(
            f"{spec.path.name}: a context of {context} tokens takes {row_bytes} bytes of memory, "
            f"`memory_bytes` is {settings.memory_bytes}"
        )
    # A step is hundreds of small operators, between which a thread that sleeps wakes too late: a
    # third of the time of a step for one row.
    spec = replace(spec, options=spec.options.model_copy(update={"spinning": True}))
    decoder = engine_for(spec)(spec, settings, rows=rows, context=context)
    _warm_up(decoder)
    return decoder


def engine_for(spec: DecoderSpec) -> Opening:
    """What opens the decoder of `spec`. Raises EngineFailed where its engine has none such."""
    if spec.engine == "onnxruntime":
        from deployments.engines.onnx_decoder import OnnxDecoder
        from deployments.engines.onnx_encoder_decoder import OnnxEncoderDecoder

        return OnnxDecoder if spec.decoding.source is None else OnnxEncoderDecoder
    if spec.engine == "torch" and spec.decoding.source is None:
        from deployments.engines.torch_decoder import TorchDecoder

        return TorchDecoder
    raise EngineFailed(f"{spec.path.name}: {spec.engine} does not generate with such a model")


def lacking(engine: EngineName, hardware: HardwareSettings) -> str | None:
    """What this process lacks to generate with an engine, as a sentence; None when it can."""
    if find_spec(engine) is None:  # engines are called by the names of their packages
        return f"the package `{engine}` is not installed"
    if engine == "torch":
        from deployments.engines.torch_decoder import lacks_device

        return lacks_device(hardware)
    return None


def candidate_here(
    manifest: ArtifactManifest, device: Device, hardware: HardwareSettings
) -> Candidate | None:
    """The first candidate for `device`, which is the fastest, of those that this process can run.

    Where it lacks something for all of them it is the first. None: there are none.
    """
    candidates = manifest.candidates_for(device)
    can = (candidate for candidate in candidates if lacking(candidate.engine, hardware) is None)
    return next(can, next(iter(candidates), None))


def _value_bytes(spec: DecoderSpec) -> int:
    """What a key or a value takes in memory. For GPUs whatever has rounded weights is in fp16."""
    if spec.memory == "int8":
        return 1
    is_rounded = spec.device is Device.GPU and spec.precision in ("int8", "int4")
    return 2 if spec.precision in _HALVES or is_rounded else 4


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
