"""Opening of decoders: choice of the candidate, KV slots within the memory limit, and warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings, HardwareSettings
from deployments.engines import ENGINES, missing_requirement
from deployments.engines.decoder import DecoderEngine, DecoderFactory, DecoderSpec
from deployments.engines.pytorch.capture import count_staging_slots
from deployments.errors import EngineFailed, RequirementMissing

WARM_UP_TOKENS = 32
# Bytes per value of the recurrent states of a slot. Engines keep two sets in fp32, those of torch a
# part of them in fewer bytes.
_STATE_BYTES = 2 * 4
_LATENT_CACHES = ("torch", "transformers")  # engines that cache latent vectors


def open_decoder(spec: DecoderSpec, settings: GeneratorSettings) -> DecoderEngine:
    """Open a decoder, allocate its KV cache and warm it up.

    Raises RequirementMissing if this process cannot run `spec`, or if `kv_cache_bytes` is below the
    size of the smallest KV cache. Raises EngineFailed if the engine fails, ManifestInvalid for an
    encoder-decoder without an encoder graph.
    """
    if reason := missing_requirement(spec, settings):
        raise RequirementMissing(f"{spec.path.name}: {reason}")
    context = min(settings.max_context_tokens, spec.max_tokens)
    slots = _count_slots(spec, settings, context)
    # A decode step has hundreds of small operators. Without spinning, waking threads between the
    # operators takes a third of the time of a step with one slot.
    spec = replace(spec, options=spec.options.model_copy(update={"spinning": True}))
    decoder = find_decoder_factory(spec)(spec, settings, slots=slots, context=context)
    with close_on_error(decoder):
        _warm_up(decoder)
    return decoder


def _count_slots(spec: DecoderSpec, settings: GeneratorSettings, context: int) -> int:
    slot_bytes, staging = _measure_slot(spec, context), count_staging_slots(spec, settings)
    slots = min(settings.kv_slots, settings.kv_cache_bytes // slot_bytes - staging)
    if slots < 1:
        raise RequirementMissing(
            f"{spec.path.name}: `kv_cache_bytes` is {settings.kv_cache_bytes}; the smallest KV "
            f"cache for {context} tokens needs {(1 + staging) * slot_bytes}. Increase it or reduce "
            "`max_context_tokens`."
        )
    return slots


def _measure_slot(spec: DecoderSpec, context: int) -> int:
    """Return the bytes of a KV slot on each device."""
    config = spec.generation_config
    source = config.encoder_decoder
    tokens = context + (0 if source is None else source.max_source_tokens)
    slot_bytes = tokens * kv_bytes_per_token(spec)
    # With tensor parallelism each GPU caches only its share of the heads.
    return slot_bytes // spec.options.tensor_parallel_size + _STATE_BYTES * config.state_values


def measure_kv_cache(spec: DecoderSpec, settings: GeneratorSettings) -> int:
    """Return the bytes of the KV cache that `open_decoder` allocates on all devices together.

    With `kv_offload` only recurrent states are on the device. Raises RequirementMissing if
    `kv_cache_bytes` is below the size of the smallest KV cache.
    """
    context = min(settings.max_context_tokens, spec.max_tokens)
    slots = _count_slots(spec, settings, context) + count_staging_slots(spec, settings)
    if spec.options.kv_offload:
        return slots * _STATE_BYTES * spec.generation_config.state_values
    return slots * _measure_slot(spec, context) * spec.options.tensor_parallel_size


@contextmanager
def close_on_error(decoder: DecoderEngine) -> Iterator[None]:
    """Close the decoder if the block raises."""
    try:
        yield
    except BaseException:
        decoder.close()
        raise


def find_decoder_factory(spec: DecoderSpec) -> DecoderFactory:
    """Return the decoder factory of the engine of `spec`.

    Raises EngineFailed if the engine does not run generative models.
    """
    kind = ENGINES.get(spec.engine)
    if kind is None or kind.open_decoder is None:
        raise EngineFailed(f"{spec.path.name}: {spec.engine} does not run generative models")
    return kind.open_decoder


def select_candidate(
    manifest: ArtifactManifest, device: Device, hardware: HardwareSettings
) -> Candidate | None:
    """Return the fastest candidate for `device` that this process can run.

    The candidates are sorted by speed. If this process can run none of them, return the first one.
    Return None if there is no candidate.
    """
    candidates = manifest.candidates_for(device)
    runnable = (
        candidate for candidate in candidates if missing_requirement(candidate, hardware) is None
    )
    return next(runnable, next(iter(candidates), None))


def _kv_value_bytes(spec: DecoderSpec) -> int:
    if spec.kv_cache_dtype == "int8":
        return 1
    return 4 if spec.compute_precision == "fp32" else 2


def _warm_up(decoder: DecoderEngine) -> None:
    """Run one prefill, and one decode step for each number of slots.

    The first call of each kind is slow, because it packs weights and allocates memory. On a GPU,
    the first decode step for each number of slots may also capture a CUDA graph.
    """
    info = decoder.info
    decoder.prefill(0, [0] * min(WARM_UP_TOKENS, info.max_source_tokens or info.context - 1), 0)
    for slots in range(1, info.slots + 1):
        decoder.decode(np.zeros(slots, np.int64), np.ones(slots, np.int64))


def kv_bytes_per_token(spec: DecoderSpec) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    config = spec.generation_config
    values = config.token_kv_values or 2 * config.layers * config.kv_heads * config.head_dim
    if spec.engine in _LATENT_CACHES:
        values = config.token_latent_values or values
    return values * _kv_value_bytes(spec)
