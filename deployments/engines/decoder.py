"""Interfaces of decoder engines: KV slots, prefill, decode steps and verification.

A decoder caches the keys and values of every computed token, for each layer with attention. The
cache is divided into KV slots, one per sequence, and persists between calls. Other layers have
recurrent states, one per slot, which also persist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import ArtifactManifest, Candidate, EngineOptions
from deployments.artifacts.types import Device, EngineName, KvCacheDtype, Precision
from deployments.config import HardwareSettings
from deployments.errors import EngineFailed, ManifestInvalid

# Graph input of shape [1]: the index of the first input token for which the graph returns logits.
LOGITS_FROM = "logits_from"
# Graph input, a boolean: true for a prefill, false for a decode step. Only graphs that compute
# prefill and decode steps in different ways have this input.
IS_PREFILL = "is_prefill"

# The two cache arrays of a layer. Names of graph inputs and outputs contain these words, such as
# `past_key_values.0.key`.
KV_NAMES = ("key", "value")

# Prefixes of the graph inputs and outputs with recurrent states, such as `past_states.0.conv`.
PAST_STATES, PRESENT_STATES = "past_states.", "present_states."

TokenColumn = NDArray[np.int64]  # [n], a token id or a length for each of n slots
Logits = NDArray[np.float32]  # [V] or [n, V], V: vocabulary; valid until the next engine call


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Description of a decoder for the engine that opens it.

    A build also opens decoders before it seals their artifact, when there is no manifest yet.
    """

    path: Path
    encoder: Path | None = None
    engine: EngineName = "onnxruntime"
    device: Device
    precision: Precision
    kv_cache_dtype: KvCacheDtype | None = None  # None: as `compute_precision`
    options: EngineOptions
    generation_config: GenerationConfig
    vocabulary: int  # V, the width of the logits
    max_tokens: int  # limit of prompt and answer together; for encoder-decoders, limit of each

    @classmethod
    def of(cls, directory: Path, manifest: ArtifactManifest, candidate: Candidate) -> Self:
        """Return the spec of a candidate of the artifact in `directory`.

        Raises ManifestInvalid if the model is not generative.
        """
        if manifest.generation_config is None:
            raise ManifestInvalid(
                f"Model {manifest.id} has no `generation_config`, so nothing can generate with it"
            )
        return cls(
            path=directory / candidate.graph,
            encoder=None if candidate.encoder is None else directory / candidate.encoder,
            engine=candidate.engine,
            device=candidate.device,
            precision=candidate.precision,
            kv_cache_dtype=candidate.kv_cache_dtype,
            options=candidate.options,
            generation_config=manifest.generation_config,
            vocabulary=manifest.output_width,
            max_tokens=manifest.max_tokens,
        )

    @property
    def compute_precision(self) -> Precision:
        """Precision of the activations, and of the KV cache if `kv_cache_dtype` is None."""
        if self.precision in ("fp32", "fp16", "bf16"):
            return self.precision
        # On GPUs quantized weights are multiplied in fp16.
        return "fp16" if self.device is Device.GPU else "fp32"

    @property
    def compute_type(self) -> str:
        """The value of the x-compute-type header, such as "cpu-int4"."""
        return f"{self.device}-{self.precision}"


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """Properties of an open decoder."""

    compute_type: str
    slots: int
    context: int  # tokens per slot
    vocabulary: int  # V, the width of the logits
    # Maximum tokens per prompt of an encoder-decoder model; None for other models. The slot of an
    # encoder-decoder starts with the decoder start token and does not contain the prompt. The
    # prompt is not chunked.
    max_source_tokens: int | None = None
    max_draft_tokens: int = 0  # per `verify` call; 0: `verify` is not supported
    # A prefill that ends before the end of its prompt needs so many tokens in the slot. With fewer,
    # the keys and values of its tokens would be rounded differently than in a longer prefill.
    min_chunk_end: int = 0
    # Whether layers have recurrent states. A call changes the states of all its slots, also if it
    # fails. A prefill starts at token 0, at the end of a slot or at the start of its last prefill.
    is_recurrent: bool = False


def check_prompt(info: DecoderInfo, ids: Sequence[int], start: int) -> None:
    """Raise EngineFailed for tokens beyond the context or the vocabulary.

    On a GPU, an access outside a tensor would make every later call fail.
    """
    if start + len(ids) > info.context:
        raise EngineFailed(
            f"{info.compute_type}: {start + len(ids)} tokens exceed the context of {info.context}"
        )
    if max(ids) >= info.vocabulary:
        raise EngineFailed(
            f"{info.compute_type}: token id {max(ids)}; the maximum is {info.vocabulary - 1}"
        )


class DecoderEngine(Protocol):
    """One open decoder. Not thread-safe. Every method may raise EngineFailed.

    The contents of a slot after its valid tokens are undefined. Later calls overwrite them.
    """

    info: DecoderInfo

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Prefill T tokens at position `start` of a slot. Return the logits of the last token, [V].

        With `all_logits` return the logits of all T tokens, [T, V].
        """
        ...

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """Compute one token for each of the slots 0 to n-1. Return their logits, [n, V].

        Slot i has `lengths[i]` valid tokens before the call, and the call does not change them.
        Unless the decoder is recurrent, the caller may therefore pass any token for a slot whose
        logits it ignores. Exception: in a full slot the call overwrites the last token and returns
        undefined logits.
        """
        ...

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Compute T tokens of an answer at position `start` of a slot. Return logits [T, V].

        The logits are bitwise equal to those of T decode steps. T is at most
        `info.max_draft_tokens` + 1.
        """
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of slot `source` to slot `target`."""
        ...

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the first `tokens` tokens of two slots."""
        ...

    def close(self) -> None:
        """Release the memory; the engine cannot be used afterwards."""
        ...


class DecoderFactory(Protocol):
    """Function that opens the decoders of one engine."""

    def __call__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> DecoderEngine:
        """Open a decoder with `slots` KV slots of `context` tokens.

        Raises EngineFailed if the engine cannot open it.
        """
        ...
