"""A decoder with an encoder before it, such as T5 or BART, through ONNX Runtime.

The encoder reads a prompt once and gives what the decoder's cross attention needs of it, projected:
cross.{layer}.{key,value} [1, heads, S, size], kept per row in a memory of its own. The decoder is
fed as `onnx_decoder` says, and with that memory [B, heads, C, size] and `cross_mask` [B, C], which
is 1 where a row's prompt is. So rows with prompts and answers of any length decode in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.border import failures_of
from deployments.engines.decoder import DecoderSpec, Logits
from deployments.engines.onnx import open_bare_session
from deployments.engines.onnx_decoder import OnnxDecoder, RowMemory
from deployments.errors import EngineFailed, ManifestInvalid
from deployments.manifest import SourceReading

_NOTHING_READ = -1


class OnnxEncoderDecoder(OnnxDecoder):
    """A Decoder whose prompts are read by an encoder."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, rows: int, context: int
    ) -> None:
        source = spec.decoding.source
        if source is None or spec.encoder is None:
            raise ManifestInvalid(f"{spec.path.name}: an encoder without a graph or its facts")
        self._source: SourceReading = source
        self._encoder: ort.InferenceSession | None = open_bare_session(
            spec.encoder, spec.options, hardware, spec.precision
        )
        self._readings = count()
        super().__init__(spec, hardware, rows=rows, context=context)
        self.info = replace(self.info, source_tokens=source.source_tokens)

    def prefill(self, row: int, ids: Sequence[int], start: int, *, every: bool = False) -> Logits:
        """Read a whole prompt, and the token that answers follow. Raises EngineFailed."""
        if start or every:
            raise EngineFailed("an encoder reads prompts whole; this is a bug")
        cross = self._cross
        made = self._encoded(ids)
        for array, values in zip(cross.source_arrays, made, strict=True):
            array[row, :, : len(ids)] = values[0]
        cross.mask[row] = 0
        cross.mask[row, : len(ids)] = 1
        cross.readings[row] = next(self._readings)
        return super().prefill(row, [self._source.start_token], 0)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a row, and what it read if that is not the same already."""
        super().copy(source, target, tokens)
        cross = self._cross
        if cross.readings[source] == cross.readings[target]:
            return
        length = int(cross.mask[source].sum())
        for array in cross.source_arrays:
            array[target, :, :length] = array[source, :, :length]
        cross.mask[target] = cross.mask[source]
        cross.readings[target] = cross.readings[source]

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two rows, and what they read."""
        super().exchange(first, second, tokens)
        cross, rows = self._cross, [first, second]
        if cross.readings[first] == cross.readings[second]:
            return
        length = int(cross.mask[rows].sum(axis=1).max())
        for array in cross.source_arrays:
            array[rows, :, :length] = array[rows[::-1], :, :length]
        cross.mask[rows] = cross.mask[rows[::-1]]
        cross.readings[rows] = cross.readings[rows[::-1]]

    def close(self) -> None:
        """Drop both sessions and the memory."""
        self._encoder = None
        super().close()

    def _make_memory(
        self, session: ort.InferenceSession, spec: DecoderSpec, rows: int, context: int
    ) -> RowMemory:
        return CrossMemory(session, spec, rows, context, self._source.source_tokens)

    @property
    def _cross(self) -> CrossMemory:
        memory = self._open
        assert isinstance(memory, CrossMemory), "made by _make_memory; this is a bug"
        return memory

    def _encoded(self, ids: Sequence[int]) -> list[NDArray[np.float32]]:
        if self._encoder is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        tokens = np.array([ids], np.int64)
        feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        names = [f"cross.{name}" for name in self._cross.names]
        with failures_of(self.info.compute_type):
            made: list[NDArray[np.float32]] = self._encoder.run(names, feeds)
        return made


class CrossMemory(RowMemory):
    """Rows with a memory of what the encoder read beside that of the answer."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: DecoderSpec,
        rows: int,
        context: int,
        source_tokens: int,
    ) -> None:
        super().__init__(session, spec, rows, context)
        shape = (rows, spec.decoding.kv_heads, source_tokens, spec.decoding.head_dim)
        self.source_arrays = [np.zeros(shape, self.dtype) for _ in self.names]
        self.mask = np.zeros((rows, source_tokens), np.int64)
        self.readings = np.full(rows, _NOTHING_READ)  # which prompt lies in a row

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the rows from `first` up to `end`."""
        super().bind(binding, first, end)
        for name, array in zip(self.names, self.source_arrays, strict=True):
            rows = array[first:end]
            binding.bind_input(
                f"cross.{name}", "cpu", 0, rows.dtype.type, rows.shape, rows.ctypes.data
            )
        mask = self.mask[first:end]
        binding.bind_input("cross_mask", "cpu", 0, np.int64, mask.shape, mask.ctypes.data)
