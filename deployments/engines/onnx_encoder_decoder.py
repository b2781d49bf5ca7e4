"""A decoder with an encoder before it, such as T5 or BART, through ONNX Runtime.

The encoder reads a prompt once and gives what the decoder's cross attention needs of it, projected:
cross.{layer}.{key,value} [1, heads, S, size], kept per slot in a memory of its own. The decoder is
fed as `onnx_decoder` says, and with that memory [B, heads, C, size] and `cross_mask` [B, C], which
is 1 where a slot's prompt is. So slots with prompts and answers of any length decode in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import DecoderSpec, Logits
from deployments.engines.onnx import open_bare_session
from deployments.engines.onnx_decoder import OnnxDecoder
from deployments.engines.onnx_kv_cache import (
    HostKvCache,
    KvCacheLayout,
    RowMemory,
    bind_array,
    copy_slot,
    swap_slots,
)
from deployments.errors import EngineFailed, ManifestInvalid

_NOTHING_READ = -1


class OnnxEncoderDecoder(OnnxDecoder):
    """A Decoder whose prompts are read by an encoder."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        source = spec.generation_config.encoder_decoder
        if source is None or spec.encoder is None:
            raise ManifestInvalid(f"{spec.path.name}: an encoder without a graph or its facts")
        self._source: EncoderDecoderConfig = source
        self._encoder: ort.InferenceSession | None = open_bare_session(
            spec.encoder, spec.options, hardware, spec.precision
        )
        self._readings = count()
        super().__init__(spec, hardware, slots=slots, context=context)
        self.info = replace(self.info, max_source_tokens=source.max_source_tokens)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Read a whole prompt, and the token that answers follow. Raises EngineFailed."""
        if start or all_logits:
            raise EngineFailed("an encoder reads prompts whole; this is a bug")
        cross = self._cross
        made = self._encoded(ids)
        for array, values in zip(cross.source_arrays, made, strict=True):
            array[slot, :, : len(ids)] = values[0]
        cross.mask[slot] = 0
        cross.mask[slot, : len(ids)] = 1
        cross.readings[slot] = next(self._readings)
        return super().prefill(slot, [self._source.decoder_start_token_id], 0)

    def close(self) -> None:
        """Drop both sessions and the memory."""
        self._encoder = None
        super().close()

    def _make_memory(self) -> RowMemory:
        return CrossMemory(self.layout, self._source.max_source_tokens)

    @property
    def _cross(self) -> CrossMemory:
        assert isinstance(self.memory, CrossMemory), "made by _make_memory; this is a bug"
        return self.memory

    def _encoded(self, ids: Sequence[int]) -> list[NDArray[np.float32]]:
        if self._encoder is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        tokens = np.array([ids], np.int64)
        feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        names = [f"cross.{name}" for name in self._cross.names]
        with translate_errors(self.info.compute_type):
            made: list[NDArray[np.float32]] = self._encoder.run(names, feeds)
        return made


class CrossMemory(HostKvCache):
    """Rows with a memory of what the encoder read beside that of the answer."""

    def __init__(self, layout: KvCacheLayout, max_source_tokens: int) -> None:
        super().__init__(layout)
        slots, heads, _, size = layout.shape
        shape = (slots, heads, max_source_tokens, size)
        self.source_arrays = [np.zeros(shape, layout.dtype) for _ in layout.names]
        self.mask = np.zeros((slots, max_source_tokens), np.int64)
        self.readings = np.full(slots, _NOTHING_READ)  # which prompt lies in a slot

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the slots from `first` up to `end`."""
        super().bind(binding, first, end)
        for name, array in zip(self.names, self.source_arrays, strict=True):
            bind_array(binding, array[first:end], f"cross.{name}")
        bind_array(binding, self.mask[first:end], "cross_mask")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot, and what it read if that is not the same already."""
        super().copy(source, target, tokens)
        if self.readings[source] == self.readings[target]:
            return
        copy_slot(self.source_arrays, source, target, int(self.mask[source].sum()))
        self.mask[target] = self.mask[source]
        self.readings[target] = self.readings[source]

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap two slots, and what they read."""
        super().swap(first, second, tokens)
        if self.readings[first] == self.readings[second]:
            return
        slots = [first, second]
        length = int(self.mask[slots].sum(axis=1).max())
        swap_slots(self.source_arrays, first, second, length)
        self.mask[slots] = self.mask[slots[::-1]]
        self.readings[slots] = self.readings[slots[::-1]]
