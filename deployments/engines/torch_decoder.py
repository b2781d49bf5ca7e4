"""A decoder through torch: one module over slots of memory that never move, replayed on a GPU.

The module is a torch program (torch_program.py), or a checkpoint's own model (rows_model.py).

Inputs: input_ids [B, T], lengths [B] (tokens that are valid before), wanted [L] (those of the T
tokens that logits are wanted of), memory_{0, 1, ...}: keys and values of one layer after the other,
[B, heads, tokens, size], written where they lie. Output: logits [B, L, V] in fp32.

A step is hundreds of kernels, which take longer to launch than to run. On CUDA the step of each
number of slots is therefore captured, as a graph over tensors that stay, and replayed by one launch,
from any thread: one graph for slots that hold up to 256 tokens, one for up to 512, and so on, as
attention looks at as much of all slots as the longest of them holds. Prompts are read without: their
kernels are large, their lengths many. So are steps over memory that is brought from the host, and
steps that several GPUs share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import (
    DecoderInfo,
    DecoderSpec,
    Logits,
    TokenColumn,
    check_prompt,
)
from deployments.engines.torch_engine import missing_torch_device, uses_cuda
from deployments.engines.torch_program import input_names, read_module
from deployments.engines.transformers_kv import dtype_of, open_checkpoint
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_CUDA = "cuda"
_INPUTS = ("input_ids", "lengths", "wanted")
# What is not captured looks at as much memory as it needs, rounded up to lengths kernels like.
_KV_LENGTH_STEP = 64
_SHORTEST_GRAPH = 256  # tokens of a slot that the first graph is for; each further one, twice that
_WARMING_STEPS = 3  # before a capture: libraries set memory aside at their first calls


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A module on its device, and tensors that stay where they are."""

    module: Callable[..., torch.Tensor]
    memory: torch.Tensor  # [2 * layers, slots, heads, tokens, size]
    ids: torch.Tensor  # [slots, 1], what a step reads
    lengths: torch.Tensor  # [slots]
    first: torch.Tensor  # [1]: logits are wanted of the first token
    logits: torch.Tensor  # [slots, V], what a step answers

    def part(self, first: int, end: int, tokens: int) -> Sequence[torch.Tensor]:
        """The memory of some slots, as the program takes it."""
        arrays: Sequence[torch.Tensor] = self.memory[:, first:end, :, :tokens].unbind()
        return arrays

    def step(self, slots: int, reach: int) -> None:
        """One more token for each of the first slots, none of which holds more than `reach`."""
        memory = self.part(0, slots, reach)
        logits = self.module(self.ids[:slots], self.lengths[:slots], self.first, memory)
        self.logits[:slots].copy_(logits[:, 0])


class TorchDecoder:
    """A Decoder over one module of torch.

    Of a model that is spread over several GPUs, the share of one process (parallel_decoder.py).
    """

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        self._device = _CUDA if uses_cuda(hardware) else "cpu"
        # Only where all that a step touches stays where it is, and nobody else is waited for.
        is_still = not spec.options.kv_offload and spec.options.tensor_parallel_size == 1
        self._captures = self._device == _CUDA and is_still
        # By the number of slots, and the tokens of them that are looked at.
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._loaded: _Loaded | None = None
        with translate_errors(spec.path.name):
            self._loaded = self._load(spec, hardware)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Read a prompt, or the next part of one. Raises EngineFailed."""
        import torch

        loaded, tokens = self.loaded, len(ids)
        check_prompt(self.info, ids, start)
        reach = self._reach(start + tokens)
        wanted = range(tokens) if all_logits else range(tokens - 1, tokens)
        with translate_errors(self.info.compute_type), torch.inference_mode():
            read = ([list(ids)], [start], list(wanted))
            inputs = (torch.tensor(values, device=self._device) for values in read)
            logits = loaded.module(*inputs, loaded.part(slot, slot + 1, reach))[0]
            return _on_host(logits if all_logits else logits[0])

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """One more token for each of the first slots. Raises EngineFailed."""
        import torch

        loaded, slots = self.loaded, len(ids)
        with translate_errors(self.info.compute_type), torch.inference_mode():
            loaded.ids[:slots, 0].copy_(torch.tensor(ids))
            # A full slot can only be one that is not meant.
            lengths = np.minimum(lengths, self.info.context - 1)
            loaded.lengths[:slots].copy_(torch.tensor(lengths))
            tokens = 1 + int(lengths.max())
            if self._captures:
                self._graph(slots, tokens).replay()
            else:
                loaded.step(slots, self._reach(tokens))
            return _on_host(loaded.logits[:slots])

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Not here: products of several tokens round differently. Raises EngineFailed."""
        raise EngineFailed(f"{self.info.compute_type}: the engine verifies no drafts")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a slot. Raises EngineFailed."""
        memory = self.loaded.memory
        with translate_errors(self.info.compute_type):
            memory[:, target, :, :tokens] = memory[:, source, :, :tokens]

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two slots. Raises EngineFailed."""
        memory = self.loaded.memory
        with translate_errors(self.info.compute_type):
            kept = memory[:, first, :, :tokens].clone()
            memory[:, first, :, :tokens] = memory[:, second, :, :tokens]
            memory[:, second, :, :tokens] = kept

    def close(self) -> None:
        """Drop the module, its graphs and the memory."""
        if self._loaded is None:
            return
        import torch

        self._graphs.clear()
        self._loaded = None
        if self._device == _CUDA:
            torch.cuda.empty_cache()  # others on the device are not served by torch

    @property
    def loaded(self) -> _Loaded:
        """The module and its tensors. Raises EngineFailed once it is closed."""
        if self._loaded is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._loaded

    def _reach(self, tokens: int) -> int:
        return min(-(-tokens // _KV_LENGTH_STEP) * _KV_LENGTH_STEP, self.info.context)

    def _load(self, spec: DecoderSpec, hardware: HardwareSettings) -> _Loaded:
        import torch

        if reason := missing_torch_device(spec, hardware):
            raise EngineFailed(reason)
        torch.set_num_threads(hardware.intra_op_threads)
        slots, context, generation_config = (
            self.info.slots,
            self.info.context,
            spec.generation_config,
        )
        heads = generation_config.kv_heads // spec.options.tensor_parallel_size
        zeros = partial(torch.zeros, device=self._device)
        whole = partial(zeros, dtype=torch.int64)
        return _Loaded(
            module=_open(spec, self._device),
            memory=torch.zeros(
                (2 * generation_config.layers, slots, heads, context, generation_config.head_dim),
                dtype=dtype_of(spec),
                device="cpu" if spec.options.kv_offload else self._device,
            ),
            ids=whole((slots, 1)),
            lengths=whole(slots),
            first=whole(1),
            logits=zeros((slots, spec.vocabulary)),
        )

    def _graph(self, slots: int, tokens: int) -> torch.cuda.CUDAGraph:
        reach = _SHORTEST_GRAPH
        while reach < tokens:
            reach *= 2
        key = slots, min(reach, self.info.context)
        if key not in self._graphs:
            # One call at a time, and nothing is left in their memory: they may share it.
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[key] = _captured(partial(self.loaded.step, *key), pool)
        return self._graphs[key]


def _open(spec: DecoderSpec, device: str) -> Callable[..., torch.Tensor]:
    """What computes, with the memory as its last input."""
    if spec.engine == "transformers":
        model: Callable[..., torch.Tensor] = open_checkpoint(spec, device)
        return model
    program, arrays = read_module(spec.path, device), 2 * spec.generation_config.layers
    found = input_names(program)
    if found != (*_INPUTS, *(f"memory_{number}" for number in range(arrays))):
        raise EngineFailed(f"the program of {arrays // 2} layers reads {', '.join(found)}")

    def run(*inputs: Any) -> torch.Tensor:
        answered: torch.Tensor = program(*inputs[:-1], *inputs[-1])
        return answered

    return run


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
