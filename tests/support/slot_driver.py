"""Driver of the KV slots of a decoder graph. It binds the slots as OnnxDecoder does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from build_artifacts.decoders.graphs.export import ExportedModel
from build_artifacts.types import FloatArray
from tests.support.tiny_checkpoints import END


def open_graph(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # As engines do on x86 without VNNI, where the fast int8 sums overflow. Others ignore it.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class SlotDriver:
    """KV slots of `context` tokens and `width` encoder tokens, initially filled with noise."""

    def __init__(
        self, written: ExportedModel, rows: int = 3, context: int = 24, width: int = 16
    ) -> None:
        self.written = written
        self._session = open_graph(written.decoder)
        self._encoder = open_graph(written.encoder) if written.encoder else None
        names = [f"{i}.{part}" for i in range(written.layers) for part in ("key", "value")]
        self._own = {name: self._noise(rows, context) for name in names}
        self._cross = {name: self._noise(rows, width) for name in names} if self._encoder else {}
        self._sources = np.zeros((rows, width), np.int64)  # `cross_mask`, 1 at prompt tokens
        self.lengths = np.zeros(rows, np.int64)

    def _noise(self, rows: int, tokens: int) -> FloatArray:
        shape = (rows, self.written.kv_heads, tokens, self.written.head_dim)
        return np.random.default_rng(3).standard_normal(shape, dtype=np.float32) * 50

    def read_source(self, row: int, ids: Sequence[int], padding: int = 0) -> None:
        """Run the encoder on a prompt with `padding` padding tokens."""
        assert self._encoder is not None
        padded = np.array([[*ids, *[1] * padding]], np.int64)
        mask = (np.arange(padded.shape[1]) < len(ids)).astype(np.int64)[None]
        names = [output.name for output in self._encoder.get_outputs()]
        states_by_name = self._encoder.run(names, {"input_ids": padded, "attention_mask": mask})
        for name, states in zip(names, states_by_name, strict=True):
            memory = self._cross[name.removeprefix("cross.")]
            memory[row, :, : len(ids)] = states[0, :, : len(ids)]
        self._sources[row] = np.arange(self._sources.shape[1]) < len(ids)

    def prefill(self, row: int, ids: Sequence[int], all_logits: bool = False) -> FloatArray:
        """Prefill tokens of a slot. Return the last logits [V], or all logits [T, V]."""
        self.lengths[row] += len(ids)
        logits = self._run(
            row, row + 1, np.array([ids], np.int64), 0 if all_logits else len(ids) - 1
        )
        return logits[0] if all_logits else logits[0, 0]

    def decode(self, tokens: Sequence[int]) -> FloatArray:
        """Decode one token for each of the first n slots. Return logits [n, V]."""
        count = len(tokens)
        self.lengths[:count] += 1
        return self._run(0, count, np.array(tokens, np.int64)[:, None], 0)[:, 0]

    def copy(self, source: int, target: int) -> None:
        for array in (*self._own.values(), *self._cross.values(), self._sources, self.lengths):
            array[target] = array[source]

    def _run(self, first: int, end: int, ids: NDArray[np.int64], logits_from: int) -> FloatArray:
        context = next(iter(self._own.values())).shape[2]
        mask = (np.arange(context) < self.lengths[first:end, None]).astype(np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": mask,
            "logits_from": np.array([logits_from], np.int64),
        }
        if self._cross:
            feeds["cross_mask"] = np.ascontiguousarray(self._sources[first:end])
        binding = self._session.io_binding()
        for name, feed in feeds.items():
            binding.bind_cpu_input(name, feed)
        for prefix, arrays in (("past_key_values", self._own), ("cross", self._cross)):
            for name, array in arrays.items():
                rows = array[first:end]
                place = ("cpu", 0, np.float32, rows.shape, rows.ctypes.data)
                binding.bind_input(f"{prefix}.{name}", *place)
                if prefix == "past_key_values":
                    binding.bind_output(f"present.{name}", *place)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: FloatArray = binding.get_outputs()[-1].numpy()
        return logits


def greedy(rows: SlotDriver, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Decode greedy answers of `steps` tokens in one batch.

    An answer contains no token of its prompt, no token twice and no END, because random weights
    would repeat one token.
    """
    sequences = [[END, *ids] for ids in prompts]
    logits = np.stack([rows.prefill(row, ids) for row, ids in enumerate(prompts)])
    for step in range(steps):
        for row, tokens in enumerate(sequences):
            logits[row, tokens] = -np.inf
            tokens.append(int(logits[row].argmax()))
        if step < steps - 1:
            logits = rows.decode([tokens[-1] for tokens in sequences])
    return [tokens[-steps:] for tokens in sequences]
