"""The contract of engines that generate: slots of memory, prompts into them, tokens out of them.

A decoder remembers what it has read: for each layer the keys and values of every token. That
memory is laid out in *slots*, one for each request at a time, and stays between calls.
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
from deployments.errors import EngineFailed, ManifestInvalid

# The input of a decoder's graph that says from which token on logits are wanted, [1].
LOGITS_FROM = "logits_from"
# The input that says whether the tokens are a prompt's, or an answer's; of graphs that compute the
# two in different ways.
IS_PREFILL = "is_prefill"

# The two arrays that a layer keeps, as its graph's inputs and outputs are called.
KV_NAMES = ("key", "value")

TokenColumn = NDArray[np.int64]  # [n], one token or one count for each of n slots
Logits = NDArray[np.float32]  # [V], or [n, V]; valid until the engine's next call


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """All that an engine must know of a decoder's graph to open it, sealed or not."""

    path: Path
    encoder: Path | None = None
    engine: EngineName = "onnxruntime"
    device: Device
    precision: Precision
    kv_cache_dtype: KvCacheDtype | None = (
        None  # of keys and values; None: as the engine computes them
    )
    options: EngineOptions
    generation_config: GenerationConfig
    vocabulary: int  # V
    max_tokens: int  # of prompt and answer together, that the model was made for

    @classmethod
    def of(cls, directory: Path, manifest: ArtifactManifest, candidate: Candidate) -> Self:
        """The spec of a sealed candidate; `directory` is that of the artifact."""
        if manifest.generation_config is None:
            raise ManifestInvalid(
                f"{directory}: `generation_config` is missing, and the model generates"
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
    def floats(self) -> Precision:
        """What is computed in floats, keys and values among it unless `memory` says otherwise."""
        if self.precision in ("fp32", "fp16", "bf16"):
            return self.precision
        # For GPUs whatever has rounded weights multiplies in fp16.
        return "fp16" if self.device is Device.GPU else "fp32"

    @property
    def compute_type(self) -> str:
        """The value of the x-compute-type header, such as "cpu-int4"."""
        return f"{self.device}-{self.precision}"


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """Facts about a decoder, as data."""

    compute_type: str
    slots: int  # requests whose memory it holds at once
    context: int  # tokens a slot has room for
    vocabulary: int  # V
    # Tokens that an encoder reads of a prompt. They are no part of the slot, which then holds a
    # first token that is not the prompt's; such a prompt is read whole. None: without an encoder.
    max_source_tokens: int | None = None
    max_draft_tokens: int = 0  # tokens behind the last one that it can verify; 0: it verifies none


def check_prompt(info: DecoderInfo, ids: Sequence[int], start: int) -> None:
    """Raise EngineFailed for tokens that there is no room for, or that are none.

    A GPU that is sent outside of a tensor refuses whatever comes after.
    """
    if start + len(ids) > info.context or max(ids) >= info.vocabulary:
        raise EngineFailed(f"{info.compute_type}: there is no room, or no such token")


class DecoderEngine(Protocol):
    """One loaded decoder. Not thread-safe: one thread calls it. Every call may raise EngineFailed.

    What a slot holds beyond the tokens that a caller counts as valid is noise, and is overwritten.
    """

    info: DecoderInfo

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Read T tokens into a slot that holds `start` valid ones: the logits after the last, [V].

        With `every`, those after each of them, [T, V].
        """
        ...

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """Read one more token into each of the slots 0 to n-1: the logits after each, [n, V].

        `lengths[i]` tokens of slot i are valid before. A slot that is not meant may take part with
        any token: it is written where its next token will be.
        """
        ...

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Read T tokens of an answer into a slot that holds `start` valid ones: [T, V].

        To the bit what `decode` gives for one after the other. At most `info.max_draft_tokens` of them
        come behind the first.
        """
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Make the first `tokens` of slot `target` those of slot `source`."""
        ...

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the first `tokens` of two slots."""
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
        ...
