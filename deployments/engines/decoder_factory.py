"""Opening a decoder: which engine, and how many slots the memory is enough for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings, HardwareSettings
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.errors import EngineFailed

WARM_UP_TOKENS = 32
_BY_TORCH = ("torch", "transformers")


class Opening(Protocol):
    """An engine, which is what opens a decoder."""

    def __call__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> DecoderEngine:
        """The decoder, with memory for `slots` of `context` tokens. Raises EngineFailed."""
        ...


def open_decoder(spec: DecoderSpec, settings: GeneratorSettings) -> DecoderEngine:
    """The decoder, its memory set aside. Raises EngineFailed."""
    if reason := missing_requirement(spec, settings):
        raise EngineFailed(f"{spec.path.name}: {reason}")
    context = min(settings.max_context_tokens, spec.max_tokens)
    source = (
        0
        if spec.generation_config.encoder_decoder is None
        else spec.generation_config.encoder_decoder.max_source_tokens
    )
    slot_bytes = (context + source) * kv_bytes_per_token(spec.generation_config, _value_bytes(spec))
    slot_bytes //= spec.options.tensor_parallel_size  # each has its share of the heads
    slots = min(settings.kv_slots, settings.kv_cache_bytes // slot_bytes)
    if not slots:
        raise EngineFailed(
            f"{spec.path.name}: a context of {context} tokens takes {slot_bytes} bytes of memory, "
            f"`kv_cache_bytes` is {settings.kv_cache_bytes}"
        )
    # A step is hundreds of small operators, between which a thread that sleeps wakes too late: a
    # third of the time of a step for one slot.
    spec = replace(spec, options=spec.options.model_copy(update={"spinning": True}))
    decoder = engine_for(spec)(spec, settings, slots=slots, context=context)
    with close_on_error(decoder):
        _warm_up(decoder)
    return decoder


@contextmanager
def close_on_error(decoder: DecoderEngine) -> Iterator[None]:
    """Give the decoder's memory back where the block raises: nobody is going to have it."""
    try:
        yield
    except BaseException:
        decoder.close()
        raise


def engine_for(spec: DecoderSpec) -> Opening:
    """What opens the decoder of `spec`. Raises EngineFailed where its engine has none such."""
    if spec.engine == "onnxruntime":
        from deployments.engines.onnx_decoder import OnnxDecoder
        from deployments.engines.onnx_encoder_decoder import OnnxEncoderDecoder

        return OnnxDecoder if spec.generation_config.encoder_decoder is None else OnnxEncoderDecoder
    if spec.engine in _BY_TORCH and spec.generation_config.encoder_decoder is None:
        from deployments.engines.tensor_parallel_decoder import TensorParallelDecoder
        from deployments.engines.torch_decoder import TorchDecoder

        return TorchDecoder if spec.options.tensor_parallel_size == 1 else TensorParallelDecoder
    raise EngineFailed(f"{spec.path.name}: {spec.engine} does not generate with such a model")


def missing_requirement(what: Candidate | DecoderSpec, hardware: HardwareSettings) -> str | None:
    """What this process lacks to generate with it, as a sentence; None when it can."""
    for package in _packages(what):
        if find_spec(package) is None:
            return f"the package `{package}` is not installed"
    if what.engine in _BY_TORCH:
        from deployments.engines.torch_decoder import missing_torch_device

        return missing_torch_device(what.options, hardware)
    return None


def _packages(what: Candidate | DecoderSpec) -> Sequence[str]:
    """What must be installed; engines are called by the names of their packages."""
    if what.engine == "transformers":
        rounding = ("bitsandbytes",) if what.precision in ("int8", "nf4") else ()
        return ("torch", "transformers", "accelerate", *rounding)
    return (what.engine,)


def select_candidate(
    manifest: ArtifactManifest, device: Device, hardware: HardwareSettings
) -> Candidate | None:
    """The first candidate for `device`, which is the fastest, of those that this process can run.

    Where it lacks something for all of them it is the first. None: there are none.
    """
    candidates = manifest.candidates_for(device)
    can = (
        candidate for candidate in candidates if missing_requirement(candidate, hardware) is None
    )
    return next(can, next(iter(candidates), None))


def _value_bytes(spec: DecoderSpec) -> int:
    """What a key or a value takes in memory."""
    if spec.kv_cache_dtype == "int8":
        return 1
    return 4 if spec.floats == "fp32" else 2


def _warm_up(decoder: DecoderEngine) -> None:
    """Do once what is slow the first time, before somebody waits for it.

    Weights are laid out and memory is touched; the calls for each number of slots are bound.
    """
    info = decoder.info
    decoder.prefill(0, [0] * min(WARM_UP_TOKENS, info.max_source_tokens or info.context - 1), 0)
    for slots in range(1, info.slots + 1):
        decoder.decode(np.zeros(slots, np.int64), np.ones(slots, np.int64))


def kv_bytes_per_token(generation_config: GenerationConfig, value_bytes: int) -> int:
    """What the memory of one token takes, in all layers."""
    return (
        2
        * generation_config.layers
        * generation_config.kv_heads
        * generation_config.head_dim
        * value_bytes
    )
