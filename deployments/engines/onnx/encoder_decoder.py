"""Encoder-decoders such as T5 or BART through ONNX Runtime.

The encoder processes a prompt of S tokens once and returns the projected keys and values of cross
attention: cross.{layer}.{key,value} [1, heads, S, size]. A second cache stores them per slot. The
decoder has the inputs of `decoder.py` and two more: the second cache [B, heads, C, size] and
`cross_mask` [B, C]. C is `max_source_tokens`, and the mask is 1 at the prompt tokens of a slot. One
call therefore decodes slots with prompts and answers of any length.
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
from deployments.engines.onnx.decoder import OnnxDecoder
from deployments.engines.onnx.kv_cache import (
    HostKvCache,
    KvCache,
    KvCacheLayout,
    bind_array,
    copy_slot,
    swap_slots,
)
from deployments.engines.onnx.sessions import open_bare_session, uses_gpu
from deployments.errors import EngineFailed, ManifestInvalid

_NO_SOURCE = -1


class OnnxEncoderDecoder(OnnxDecoder):
    """Decoder engine for two sessions, encoder and decoder."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        config = spec.generation_config.encoder_decoder
        if config is None or spec.encoder is None:
            raise ManifestInvalid(
                f"{spec.path.name}: `encoder` or `generation_config.encoder_decoder` is missing"
            )
        if uses_gpu(spec.options, hardware):
            raise EngineFailed(
                f"{spec.path.name}: encoder-decoder models run on the CPU only, because their KV "
                "cache is in host memory. Build the model again"
            )
        self._config: EncoderDecoderConfig = config
        self._encoder: ort.InferenceSession | None = open_bare_session(
            spec.encoder, spec.options, hardware, spec.precision
        )
        self._source_numbers = count()
        super().__init__(spec, hardware, slots=slots, context=context)
        self.info = replace(self.info, max_source_tokens=config.max_source_tokens)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Encode the whole prompt and prefill the decoder start token. Return its logits, [V]."""
        if start or all_logits:
            raise AssertionError("bug: an encoder-decoder prompt is chunked or needs all logits")
        cache = self._cross_cache
        outputs = self._encode(ids)
        for array, values in zip(cache.cross_arrays, outputs, strict=True):
            array[slot, :, : len(ids)] = values[0]
        cache.mask[slot] = 0
        cache.mask[slot, : len(ids)] = 1
        cache.sources[slot] = next(self._source_numbers)
        return super().prefill(slot, [self._config.decoder_start_token_id], 0)

    def close(self) -> None:
        self._encoder = None
        super().close()

    def _create_kv_cache(self) -> KvCache:
        return CrossKvCache(self.layout, self._config.max_source_tokens)

    @property
    def _cross_cache(self) -> CrossKvCache:
        assert isinstance(self.kv_cache, CrossKvCache), "bug: another class of KV cache"
        return self.kv_cache

    def _encode(self, ids: Sequence[int]) -> list[NDArray[np.float32]]:
        if self._encoder is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        tokens = np.array([ids], np.int64)
        feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        names = [f"cross.{name}" for name in self._cross_cache.names]
        with translate_errors(self.info.compute_type):
            outputs: list[NDArray[np.float32]] = self._encoder.run(names, feeds)
        return outputs


class CrossKvCache(HostKvCache):
    """Host KV cache with the keys and values of cross attention."""

    def __init__(self, layout: KvCacheLayout, max_source_tokens: int) -> None:
        super().__init__(layout)
        slots, heads, _, size = layout.shape
        shape = (slots, heads, max_source_tokens, size)
        self.cross_arrays = [np.zeros(shape, layout.dtype) for _ in layout.names]
        self.mask = np.zeros((slots, max_source_tokens), np.int64)
        self.sources = np.full(slots, _NO_SOURCE)  # serial number of each slot's prompt

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        super().bind(binding, first, end)
        for name, array in zip(self.names, self.cross_arrays, strict=True):
            bind_array(binding, array[first:end], f"cross.{name}")
        bind_array(binding, self.mask[first:end], "cross_mask")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot. Also copy the encoded prompt if the two slots have different prompts."""
        super().copy(source, target, tokens)
        if self.sources[source] == self.sources[target]:
            return
        copy_slot(self.cross_arrays, source, target, int(self.mask[source].sum()))
        self.mask[target] = self.mask[source]
        self.sources[target] = self.sources[source]

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap two slots. Also swap the encoded prompts if the two prompts differ."""
        super().swap(first, second, tokens)
        if self.sources[first] == self.sources[second]:
            return
        pair = [first, second]
        length = int(self.mask[pair].sum(axis=1).max())
        swap_slots(self.cross_arrays, first, second, length)
        self.mask[pair] = self.mask[pair[::-1]]
        self.sources[pair] = self.sources[pair[::-1]]
