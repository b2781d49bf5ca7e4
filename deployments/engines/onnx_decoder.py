"""A decoder through ONNX Runtime: graphs in the layout of onnxruntime-genai's model builder.

Their attention (com.microsoft GroupQueryAttention) takes each row's own length from the sums of
`attention_mask`, and writes what it reads behind what is there. With past and present bound to the
same memory nothing is copied, rows of different lengths decode in one call, and a row that stands
anywhere in the memory is filled by a call of its own: continuous batching on any provider.

Inputs: input_ids [B, T], attention_mask [B, rows of memory], past_key_values.{layer}.{key,value}
[B, heads, tokens, size], logits_from [1] (from which of the T tokens on logits are wanted).
Outputs: logits [B, T - logits_from, V], present.{layer}.{key,value}.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.border import failures_of
from deployments.engines.decoder import DecoderInfo, DecoderSpec, Logits, TokenColumn
from deployments.engines.onnx import open_bare_session
from deployments.errors import EngineFailed

LOGITS_FROM = "logits_from"
_PARTS = ("key", "value")


class OnnxDecoder:
    """A Decoder over one ONNX Runtime session, its memory on the CPU."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, rows: int, context: int
    ) -> None:
        context = min(context, spec.most_tokens)
        self.info = DecoderInfo(spec.compute_type, rows, context, spec.vocabulary)
        session = open_bare_session(spec.path, spec.options, hardware, spec.precision)
        with failures_of(spec.path.name):
            self._memory: RowMemory | None = self._make_memory(session, spec, rows, context)
        self._steps: dict[int, _Step] = {}

    def prefill(self, row: int, ids: Sequence[int], start: int, *, every: bool = False) -> Logits:
        """Read a prompt, or the next part of one. Raises EngineFailed."""
        tokens = len(ids)
        step = _Step(self._open, row, row + 1, tokens, logits=tokens if every else 1)
        step.ids[0] = ids
        step.mask[0, : start + tokens] = 1
        logits: Logits = self._run(step)[0]
        return logits if every else logits[0]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """One more token for each of the first rows. Raises EngineFailed."""
        rows = len(ids)
        memory = self._open
        step = self._steps.get(rows)
        if step is None:
            step = self._steps[rows] = _Step(memory, 0, rows, tokens=1, logits=1)
        step.ids[:, 0] = ids
        np.less_equal(memory.positions, lengths[:, None], out=step.mask, casting="unsafe")
        return self._run(step)[:, 0]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a row."""
        for array in self._open.arrays:
            array[target, :, :tokens] = array[source, :, :tokens]

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two rows, an array at a time."""
        for array in self._open.arrays:
            kept = array[first, :, :tokens].copy()
            array[first, :, :tokens] = array[second, :, :tokens]
            array[second, :, :tokens] = kept

    def close(self) -> None:
        """Drop the session and the memory."""
        self._memory = None
        self._steps = {}

    def _make_memory(
        self, session: ort.InferenceSession, spec: DecoderSpec, rows: int, context: int
    ) -> RowMemory:
        return RowMemory(session, spec, rows, context)

    @property
    def _open(self) -> RowMemory:
        if self._memory is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._memory

    def _run(self, step: _Step) -> Logits:
        with failures_of(self.info.compute_type):
            self._open.session.run_with_iobinding(step.binding)
        return step.logits


class RowMemory:
    """Keys and values of all rows: for each layer two arrays [rows, heads, tokens, size].

    Zeroed pages cost nothing until they are written, so rows that were never used are free.
    """

    def __init__(
        self, session: ort.InferenceSession, spec: DecoderSpec, rows: int, context: int
    ) -> None:
        self.session = session
        self.vocabulary = spec.vocabulary
        shape = (rows, spec.decoding.kv_heads, context, spec.decoding.head_dim)
        halves = any(o.type == "tensor(float16)" for o in session.get_outputs())
        self.dtype = np.dtype(np.float16 if halves else np.float32)
        layers = range(spec.decoding.layers)
        self.names = [f"{layer}.{part}" for layer in layers for part in _PARTS]
        self.arrays: list[NDArray[np.floating]] = [np.zeros(shape, self.dtype) for _ in self.names]
        self.positions = np.arange(context)  # [context]

    def bind(self, binding: ort.IOBinding, first: int, end: int) -> None:
        """Let a call read and write the rows from `first` up to `end`."""
        for name, array in zip(self.names, self.arrays, strict=True):
            rows = array[first:end]
            place = ("cpu", 0, rows.dtype.type, rows.shape, rows.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", *place)
            binding.bind_output(f"present.{name}", *place)


class _Step:
    """One kind of call, bound once: the rows it is about, and memory for what goes in and out."""

    def __init__(self, memory: RowMemory, first: int, end: int, tokens: int, logits: int) -> None:
        rows = end - first
        self.ids = np.zeros((rows, tokens), np.int64)
        self.mask = np.zeros((rows, len(memory.positions)), np.int64)
        self._from = np.array([tokens - logits], np.int64)
        self._raw = np.empty((rows, logits, memory.vocabulary), memory.dtype)
        self.binding = memory.session.io_binding()
        for name, array in (
            ("input_ids", self.ids),
            ("attention_mask", self.mask),
            (LOGITS_FROM, self._from),
        ):
            self.binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        place = ("cpu", 0, memory.dtype.type, self._raw.shape, self._raw.ctypes.data)
        self.binding.bind_output("logits", *place)
        memory.bind(self.binding, first, end)

    @property
    def logits(self) -> NDArray[np.float32]:
        """What the last call answered, [rows, logits, V]."""
        return self._raw.astype(np.float32, copy=False)
