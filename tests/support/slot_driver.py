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
    # Engines set this on x86 without VNNI, where the fast int8 sums overflow. Other CPUs ignore it.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


_SLOTS = 3
_SOURCE_TOKENS = 16


class SlotDriver:
    """KV slots of `context` tokens and _SOURCE_TOKENS encoder tokens, initially full of noise."""

    def __init__(self, written: ExportedModel, context: int = 24) -> None:
        self.written = written
        self._session = open_graph(written.decoder)
        self._encoder = open_graph(written.encoder) if written.encoder else None
        names = [f"{i}.{part}" for i in range(written.layers) for part in ("key", "value")]
        self._own = {name: self._noise(context) for name in names}
        self._cross = {name: self._noise(_SOURCE_TOKENS) for name in names} if self._encoder else {}
        # Graph input `cross_mask`: 1 at prompt tokens.
        self._sources = np.zeros((_SLOTS, _SOURCE_TOKENS), np.int64)
        self.lengths = np.zeros(_SLOTS, np.int64)

    def _noise(self, tokens: int) -> FloatArray:
        shape = (_SLOTS, self.written.kv_heads, tokens, self.written.head_dim)
        return np.random.default_rng(3).standard_normal(shape, dtype=np.float32) * 50

    def read_source(self, slot: int, ids: Sequence[int]) -> None:
        """Run the encoder on a prompt."""
        assert self._encoder is not None
        feeds = {"input_ids": np.array([ids], np.int64)}
        feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
        names = [output.name for output in self._encoder.get_outputs()]
        states_by_name = self._encoder.run(names, feeds)
        for name, states in zip(names, states_by_name, strict=True):
            memory = self._cross[name.removeprefix("cross.")]
            memory[slot, :, : len(ids)] = states[0]
        self._sources[slot] = np.arange(self._sources.shape[1]) < len(ids)

    def prefill(self, slot: int, ids: Sequence[int], all_logits: bool = False) -> FloatArray:
        """Prefill tokens of a slot. Return the last logits [V], or all logits [T, V]."""
        self.lengths[slot] += len(ids)
        logits = self._run(
            slot, slot + 1, np.array([ids], np.int64), 0 if all_logits else len(ids) - 1
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
                bound = array[first:end]
                place = ("cpu", 0, np.float32, bound.shape, bound.ctypes.data)
                binding.bind_input(f"{prefix}.{name}", *place)
                if prefix == "past_key_values":
                    binding.bind_output(f"present.{name}", *place)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: FloatArray = binding.get_outputs()[-1].numpy()
        return logits


def greedy(driver: SlotDriver, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Decode greedy answers of `steps` tokens in one batch.

    An answer contains no token of its prompt, no token twice and no END, because random weights
    would otherwise repeat one token.
    """
    sequences = [[END, *ids] for ids in prompts]
    logits = np.stack([driver.prefill(slot, ids) for slot, ids in enumerate(prompts)])
    for step in range(steps):
        for slot, tokens in enumerate(sequences):
            logits[slot, tokens] = -np.inf
            tokens.append(int(logits[slot].argmax()))
        if step < steps - 1:
            logits = driver.decode([tokens[-1] for tokens in sequences])
    return [tokens[-steps:] for tokens in sequences]
