"""A decoder through torch: one program over rows of memory that never move, replayed on a GPU.

Inputs: input_ids [B, T], lengths [B] (tokens that are valid before), wanted [L] (those of the T
tokens that logits are wanted of), memory_{0, 1, ...}: keys and values of one layer after the other,
[B, heads, tokens, size], written where they lie. Output: logits [B, L, V] in fp32.

A step is hundreds of kernels, which take longer to launch than to run. On CUDA the step of each
number of rows is therefore captured once, as a graph over tensors that stay, and replayed by one
launch, from any thread. Prompts are read without: their kernels are large, their lengths many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.border import failures_of
from deployments.engines.decoder import DecoderInfo, DecoderSpec, Logits, TokenColumn
from deployments.engines.torch_program import input_names, read_module
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_CUDA = "cuda"
_INPUTS = ("input_ids", "lengths", "wanted")
_TYPES = {"fp16": "float16", "bf16": "bfloat16"}  # of keys and values; float32 otherwise
# Prompts look at as much memory as they need, rounded up to lengths that kernels like.
_REACH = 64
_WARMING_STEPS = 3  # before a capture: libraries set memory aside at their first calls


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program on its device, and tensors that stay where they are."""

    program: Callable[..., torch.Tensor]
    memory: torch.Tensor  # [2 * layers, rows, heads, tokens, size]
    ids: torch.Tensor  # [rows, 1], what a step reads
    lengths: torch.Tensor  # [rows]
    first: torch.Tensor  # [1]: logits are wanted of the first token
    logits: torch.Tensor  # [rows, V], what a step answers

    def part(self, first: int, end: int, tokens: int) -> Sequence[torch.Tensor]:
        """The memory of some rows, as the program takes it."""
        arrays: Sequence[torch.Tensor] = self.memory[:, first:end, :, :tokens].unbind()
        return arrays

    def step(self, rows: int) -> None:
        """One more token for each of the first rows."""
        memory = self.part(0, rows, self.memory.shape[3])
        logits = self.program(self.ids[:rows], self.lengths[:rows], self.first, *memory)
        self.logits[:rows].copy_(logits[:, 0])


class TorchDecoder:
    """A Decoder over one torch program (see torch_program)."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, rows: int, context: int
    ) -> None:
        context = min(context, spec.most_tokens)
        self.info = DecoderInfo(spec.compute_type, rows, context, spec.vocabulary)
        self._device = _device(hardware)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the number of rows
        self._loaded: _Loaded | None = None
        with failures_of(spec.path.name):
            self._loaded = self._load(spec, hardware)

    def prefill(self, row: int, ids: Sequence[int], start: int, *, every: bool = False) -> Logits:
        """Read a prompt, or the next part of one. Raises EngineFailed."""
        import torch

        loaded, tokens = self.loaded, len(ids)
        end = start + tokens
        # A GPU that is sent outside of a tensor refuses whatever comes after.
        if end > self.info.context or max(ids) >= self.info.vocabulary:
            raise EngineFailed(f"{self.info.compute_type}: there is no room, or no such token")
        reach = min(-(-end // _REACH) * _REACH, self.info.context)
        wanted = range(tokens) if every else range(tokens - 1, tokens)
        with failures_of(self.info.compute_type), torch.inference_mode():
            read = ([list(ids)], [start], list(wanted))
            inputs = (torch.tensor(values, device=self._device) for values in read)
            logits = loaded.program(*inputs, *loaded.part(row, row + 1, reach))[0]
            return _on_host(logits if every else logits[0])

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """One more token for each of the first rows. Raises EngineFailed."""
        import torch

        loaded, rows = self.loaded, len(ids)
        with failures_of(self.info.compute_type), torch.inference_mode():
            loaded.ids[:rows, 0].copy_(torch.tensor(ids))
            # A full row can only be one that is not meant.
            loaded.lengths[:rows].copy_(torch.tensor(lengths).clamp(max=self.info.context - 1))
            if self._device == _CUDA:
                self._graph(rows).replay()
            else:
                loaded.step(rows)
            return _on_host(loaded.logits[:rows])

    def verify(self, row: int, ids: Sequence[int], start: int) -> Logits:
        """Not here: products of several tokens round differently. Raises EngineFailed."""
        raise EngineFailed(f"{self.info.compute_type}: the engine verifies no drafts")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a row. Raises EngineFailed."""
        memory = self.loaded.memory
        with failures_of(self.info.compute_type):
            memory[:, target, :, :tokens] = memory[:, source, :, :tokens]

    def exchange(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two rows. Raises EngineFailed."""
        memory = self.loaded.memory
        with failures_of(self.info.compute_type):
            kept = memory[:, first, :, :tokens].clone()
            memory[:, first, :, :tokens] = memory[:, second, :, :tokens]
            memory[:, second, :, :tokens] = kept

    def close(self) -> None:
        """Drop the program, its graphs and the memory."""
        if self._loaded is None:
            return
        import torch

        self._graphs.clear()
        self._loaded = None
        if self._device == _CUDA:
            torch.cuda.empty_cache()  # others on the device are not served by torch

    @property
    def loaded(self) -> _Loaded:
        """The program and its tensors. Raises EngineFailed once it is closed."""
        if self._loaded is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._loaded

    def _load(self, spec: DecoderSpec, hardware: HardwareSettings) -> _Loaded:
        import torch

        if reason := lacks_device(hardware):
            raise EngineFailed(reason)
        torch.set_num_threads(hardware.threads_per_run)
        program, arrays = read_module(spec.path, self._device), 2 * spec.decoding.layers
        found = input_names(program)
        if found != (*_INPUTS, *(f"memory_{number}" for number in range(arrays))):
            raise EngineFailed(f"the program of {arrays // 2} layers reads {', '.join(found)}")
        rows, context = self.info.rows, self.info.context
        shape = (arrays, rows, spec.decoding.kv_heads, context, spec.decoding.head_dim)
        zeros = partial(torch.zeros, device=self._device)
        whole = partial(zeros, dtype=torch.int64)
        return _Loaded(
            program=program,
            memory=zeros(shape, dtype=getattr(torch, _TYPES.get(spec.precision, "float32"))),
            ids=whole((rows, 1)),
            lengths=whole(rows),
            first=whole(1),
            logits=zeros((rows, spec.vocabulary)),
        )

    def _graph(self, rows: int) -> torch.cuda.CUDAGraph:
        if rows not in self._graphs:
            # One call at a time, and nothing is left in their memory: they may share it.
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[rows] = _captured(partial(self.loaded.step, rows), pool)
        return self._graphs[rows]


def lacks_device(hardware: HardwareSettings) -> str | None:
    """Why torch cannot run on the device of a generator; None when it can."""
    import torch

    if _device(hardware) == _CUDA and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _device(hardware: HardwareSettings) -> str:
    return _CUDA if any("CUDA" in provider for provider in hardware.providers) else "cpu"


def _captured(step: Callable[[], None], pool: object | None) -> torch.cuda.CUDAGraph:
    """What `step` does, to be done again; it is done before, always with the same outcome."""
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARMING_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the device.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


def _on_host(logits: torch.Tensor) -> NDArray[np.float32]:
    return np.asarray(logits.cpu().numpy())
