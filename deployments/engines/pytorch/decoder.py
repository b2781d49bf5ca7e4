"""Decoders through torch: one module over a preallocated KV cache, with CUDA graphs on a GPU.

The module is a torch program (program.py) or a whole checkpoint (transformers_checkpoint.py).

Inputs:

    input_ids           [B, T]
    lengths             [B], valid tokens per slot
    wanted              [L], indices of those of the T tokens that get logits
    memory_{0, 1, ...}  [B, heads, tokens, size], keys and values of each layer, updated in place

Layers with latent attention have two latent vectors in place of keys and values. A checkpoint may
also have recurrent states, [B, ...] each, updated in place.

Output: logits [B, L, V] in fp32.

A decode step has hundreds of kernels, and launching them takes longer than running them. On CUDA
the step is therefore captured as a CUDA graph for each number of slots. One launch replays the
graph, from any thread. In every slot, attention reads as many tokens as the longest slot has. There
are therefore graphs for up to 256 tokens, up to 512, and so on.

The prefill of up to 256 tokens is launch-bound too. A graph reads and writes fixed addresses, but a
prefill may be for any slot. Torch programs therefore have one more slot, the staging slot: a
captured prefill runs there, and its keys and values are copied from and to the slot of the prompt.
Chunks are padded to the sizes of `_CHUNK_SIZES`. Longer chunks, prompts that need logits of all
tokens, and checkpoints of transformers, whose prefill may branch on values, run uncaptured.

Calls with a KV cache on the host, with tensor parallelism, or with experts for which torch has no
kernel on the GPU, are not captured. While a model is being opened, nothing is captured. Prefill is
not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import (
    DecoderInfo,
    DecoderSpec,
    Logits,
    TokenColumn,
    check_prompt,
)
from deployments.engines.pytorch.capture import can_capture, count_staging_slots
from deployments.engines.pytorch.capture_lock import find_capture_lock
from deployments.engines.pytorch.captured_calls import CapturedCalls
from deployments.engines.pytorch.devices import (
    clear_frames,
    missing_torch_device,
    release_modules,
    to_host,
    uses_cuda,
)
from deployments.engines.pytorch.program import input_names, input_shapes, read_module
from deployments.engines.pytorch.slot_arrays import (
    KvArrays,
    SlotLayout,
    create_states,
    restored,
)
from deployments.engines.pytorch.transformers_checkpoint import open_checkpoint, torch_dtype
from deployments.engines.recurrent_states import RecurrentStates
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_CUDA = "cuda"
_INPUTS = ("input_ids", "lengths", "wanted")
# Without a CUDA graph, a call rounds the number of cached tokens up to a multiple of this. Kernels
# are fast at such lengths.
_KV_LENGTH_STEP = 64
_MIN_GRAPH_KV_LENGTH = 256  # tokens per slot of the smallest graph; the next have 512, 1024, ...
# Tokens of the chunks that captured prefills compute. Padding at most doubles the computed tokens,
# which costs less than launching the kernels one by one.
_CHUNK_SIZES = (16, 32, 64, 128, 256)
_COMPILER = "inductor"


@dataclass(frozen=True, slots=True)
class _LoadedDecoder:
    """A module on its device, with tensors at fixed addresses."""

    module: Callable[..., torch.Tensor]
    step_module: Callable[..., torch.Tensor]  # for decode steps; compiled if requested
    kv_arrays: KvArrays  # if the decoder captures prefills, the last slot is the staging slot
    states: RecurrentStates
    ids: torch.Tensor  # [slots, 1], input of a decode step
    lengths: torch.Tensor  # [slots], tokens before the call; a captured prefill uses index 0
    first: torch.Tensor  # [1], always 0: `wanted` of a decode step, which has one token per slot
    chunk: torch.Tensor  # [1, tokens], input of a captured prefill
    last: torch.Tensor  # [1], index of the last token in `chunk` that is not padding
    logits: torch.Tensor  # [slots, V], output of a decode step; a captured prefill uses row 0
    # [slots, V], a copy of `logits` on the host. With a GPU this memory is pinned, because a GPU
    # copies to unpinned memory through an extra buffer.
    host_logits: torch.Tensor

    def arrays(
        self, first: int, end: int, kv_length: int
    ) -> tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return the last inputs of a call of slots `first` to `end` - 1: KV arrays and states."""
        return self.kv_arrays.views(first, end, kv_length), self.states.views(first, end)

    def step(self, slots: int, kv_length: int) -> None:
        """Decode a token for each of the first `slots` slots, of up to `kv_length` tokens each.

        Reads `ids` and `lengths`, writes `logits`.
        """
        arrays = self.arrays(0, slots, kv_length)
        logits = self.step_module(self.ids[:slots], self.lengths[:slots], self.first, *arrays)
        self.logits[:slots].copy_(logits[:, 0])

    def prefill_chunk(self, tokens: int, kv_length: int) -> None:
        """Prefill the first `tokens` tokens of `chunk` in the staging slot, at `lengths[0]`.

        Writes the logits of the token `last` to `logits[0]`.
        """
        staging = self.kv_arrays.slots - 1
        arrays = self.arrays(staging, staging + 1, kv_length)
        logits = self.module(self.chunk[:, :tokens], self.lengths[:1], self.last, *arrays)
        self.logits[0].copy_(logits[0, 0])


class TorchDecoder:
    """Decoder engine for one torch module.

    With tensor parallelism it is the shard of one process (tensor_parallel_decoder.py).
    """

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        self._device = _CUDA if uses_cuda(hardware) else "cpu"
        self._captures = can_capture(spec, hardware)
        self._staging_slots = count_staging_slots(spec, hardware)
        self._lock = find_capture_lock(is_gpu=self._device == _CUDA)
        self._captured = CapturedCalls(self._lock)
        self._loaded: _LoadedDecoder | None = None
        try:
            with translate_errors(spec.path.name), self._lock.open_model():
                self._loaded = self._load(spec, hardware)
            self.info = replace(self.info, is_recurrent=bool(self._loaded.states))
            if self._staging_slots:
                self._capture_prefills()
        except BaseException as exc:
            clear_frames(exc)
            self._release()
            raise

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        import torch

        loaded, tokens = self.loaded, len(ids)
        check_prompt(self.info, ids, start)
        if not all_logits and (chunk := self._find_chunk_size(tokens, start)):
            return self._prefill_chunk(slot, ids, start, chunk)
        kv_length = self._round_kv_length(start + tokens)
        indices = range(tokens) if all_logits else range(tokens - 1, tokens)
        with self._running(), torch.inference_mode():
            values = ([list(ids)], [start], list(indices))
            inputs = (torch.tensor(value, device=self._device) for value in values)
            loaded.states.start_prefill(slot, start, tokens)
            logits = loaded.module(*inputs, *loaded.arrays(slot, slot + 1, kv_length))[0]
            return to_host(logits if all_logits else logits[0])

    def _find_chunk_size(self, tokens: int, start: int) -> int | None:
        """Return the size of the captured prefill for `tokens` tokens at `start`, or None.

        Its padding must fit into the slot too, because padding also has keys and values.
        """
        if not self._staging_slots:
            return None
        limit = self.info.context - start
        return next((size for size in _CHUNK_SIZES if tokens <= size <= limit), None)

    def _prefill_chunk(self, slot: int, ids: Sequence[int], start: int, size: int) -> Logits:
        """Prefill in the staging slot, with `size` - T tokens of padding after the T tokens.

        Attention is causal, so no token sees the padding. See also DecoderEngine.prefill.
        """
        import torch

        loaded, tokens, staging = self.loaded, len(ids), self.info.slots
        with torch.inference_mode():
            with self._running():
                loaded.chunk[0, :size].copy_(torch.tensor([*ids, *[0] * (size - tokens)]))
                loaded.lengths[0] = start
                loaded.last[0] = tokens - 1
            kv_length = self._graph_kv_length(start + size)
            run = self._find_call(
                (1, kv_length, size), partial(loaded.prefill_chunk, size, kv_length)
            )
            with self._running():
                loaded.kv_arrays.copy(slot, staging, 0, start)
                run()
                loaded.kv_arrays.copy(staging, slot, start, start + tokens)
                return to_host(loaded.logits[0])

    def _capture_prefills(self) -> None:
        """Capture the chunks of short prompts, and the longest chunk for slots of every length.

        A capture takes about 0.15 s. A capture during requests would delay all running answers.
        """
        longest, context = _CHUNK_SIZES[-1], self.info.context
        chunks = [(size, 0) for size in _CHUNK_SIZES]
        start = _MIN_GRAPH_KV_LENGTH
        while start < context:
            chunks.append((longest, start))
            start *= 2
        for size, start in chunks:
            if start + size <= context:
                self.prefill(0, [0] * size, start)

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        import torch

        loaded, slots = self.loaded, len(ids)
        # Only a slot whose result is ignored can be full. Keep its new token inside the cache.
        lengths = np.minimum(lengths, self.info.context - 1)
        with torch.inference_mode():
            with self._running():
                loaded.ids[:slots, 0].copy_(torch.tensor(ids))
                loaded.lengths[:slots].copy_(torch.tensor(lengths))
            # `_find_step` may capture the step and thereby run it, so the inputs are already set.
            run_step = self._find_step(slots, 1 + int(lengths.max()))
            with self._running():
                loaded.states.start_decode(lengths)
                run_step()
                # Copying a CUDA tensor to the host waits until the tensor is computed.
                logits = loaded.host_logits[:slots].copy_(loaded.logits[:slots])
                return np.asarray(logits.numpy())

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Raise EngineFailed, because MatMuls round several tokens differently from one token."""
        raise EngineFailed(f"{self.info.compute_type}: verification is not supported")

    def copy(self, source: int, target: int, tokens: int) -> None:
        loaded = self.loaded
        with self._running():
            loaded.kv_arrays.copy(source, target, 0, tokens)
            loaded.states.copy(source, target)

    def swap(self, first: int, second: int, tokens: int) -> None:
        loaded = self.loaded
        with self._running():
            loaded.kv_arrays.swap(first, second, tokens)
            loaded.states.swap(first, second)

    def close(self) -> None:
        if self._loaded is not None:
            self._release()

    def _release(self) -> None:
        with self._lock.run_pass():
            self._captured.clear()
            self._loaded = None
        release_modules(self._device, self._lock)  # collects garbage, which may have graphs
        self._captured.give_back_stream()

    @property
    def loaded(self) -> _LoadedDecoder:
        """The loaded module. Raises EngineFailed once the engine is closed."""
        if self._loaded is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._loaded

    def _round_kv_length(self, tokens: int) -> int:
        return min(-(-tokens // _KV_LENGTH_STEP) * _KV_LENGTH_STEP, self.info.context)

    def _load(self, spec: DecoderSpec, hardware: HardwareSettings) -> _LoadedDecoder:
        import torch

        if reason := missing_torch_device(spec, hardware):
            raise EngineFailed(reason)
        torch.set_num_threads(hardware.intra_op_threads)
        slots = self.info.slots
        zeros = partial(torch.zeros, device=self._device)
        int_zeros = partial(zeros, dtype=torch.int64)
        module, layout = _open_module(spec, self._device)
        return _LoadedDecoder(
            module=module,
            step_module=_compile(module) if spec.options.compile else module,
            kv_arrays=KvArrays(
                layout,
                slots=slots + self._staging_slots,
                # With a token more, no view of the first tokens is contiguous. For a contiguous one
                # torch would compile again, when a slot first gets as long as the context.
                tokens=self.info.context + spec.options.compile,
                dtype=torch_dtype(spec),
                device="cpu" if spec.options.kv_offload else self._device,
            ),
            states=create_states(layout, slots),
            ids=int_zeros((slots, 1)),
            lengths=int_zeros(slots),
            first=int_zeros(1),
            chunk=int_zeros((1, _CHUNK_SIZES[-1])),
            last=int_zeros(1),
            logits=zeros((slots, spec.vocabulary)),
            host_logits=torch.zeros((slots, spec.vocabulary), pin_memory=self._device == _CUDA),
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        with translate_errors(self.info.compute_type), self._lock.run_pass():
            yield

    def _find_step(self, slots: int, tokens: int) -> Callable[[], None]:
        """Return a function that decodes a token for each of the first `slots` slots.

        After the step, a slot has at most `tokens` tokens.
        """
        step = self.loaded.step
        if not self._captures:
            return partial(step, slots, self._round_kv_length(tokens))
        key = slots, self._graph_kv_length(tokens)
        return self._find_call(key, partial(step, *key))

    def _graph_kv_length(self, tokens: int) -> int:
        """Return the tokens per slot of the smallest graph for slots of up to `tokens` tokens."""
        kv_length = _MIN_GRAPH_KV_LENGTH
        while kv_length < tokens:
            kv_length *= 2
        return min(kv_length, self.info.context)

    def _find_call(self, key: tuple[int, ...], call: Callable[[], None]) -> Callable[[], None]:
        """Return a function that has the effect of `call`, if possible by a CUDA graph."""
        # A capture first runs the step for warm-up, which adds its tokens to the states.
        undo = partial(restored, self.loaded.states, key[0], self._running)
        with translate_errors(self.info.compute_type):
            return self._captured.find(key, call, undo)


def _open_module(spec: DecoderSpec, device: str) -> tuple[Callable[..., torch.Tensor], SlotLayout]:
    """Open the module. Its last parameters are the sequence of KV arrays, and the states."""
    if spec.engine == "transformers":
        model = open_checkpoint(spec, device)
        return model, model.layout
    program, arrays = read_module(spec.path, device), 2 * spec.generation_config.layers
    expected = (*_INPUTS, *(f"memory_{number}" for number in range(arrays)))
    if (actual := input_names(program)) != expected:
        raise EngineFailed(
            f"the program has the inputs {', '.join(actual)}; expected {', '.join(expected)}"
        )

    def run(*inputs: Any) -> torch.Tensor:
        *tokens, kv_arrays, _ = inputs
        logits: torch.Tensor = program(*tokens, *kv_arrays)
        return logits

    config = spec.generation_config
    equal = (None, config.kv_heads, None, config.head_dim)  # of a program of version 0.1
    shapes = (shape or equal for shape in input_shapes(program)[len(_INPUTS) :])
    return run, SlotLayout([(shape[1], shape[3]) for shape in shapes], states={})


def _compile(module: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compile `module` for any number of slots and tokens.

    torch compiles at the first step, and once more for a single slot. CUDA graphs of torch.compile
    are not used, because they belong to one thread. `capture` records the CUDA graphs instead.
    """
    import torch

    compiled: Callable[..., torch.Tensor] = torch.compile(module, dynamic=True, backend=_COMPILER)
    return compiled
