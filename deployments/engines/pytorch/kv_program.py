"""Models of transformers over an external KV cache at fixed addresses.

decoder.py describes inputs and output. The cache of the model writes to given tensors
(slot_cache.py), and a mask marks the valid tokens of each slot (transformers_attention.py). The
build traces the call as a program (program.py). An artifact with a whole checkpoint runs it
untraced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deployments.artifacts.types import Attention
from deployments.engines.layer_types import (
    GLOBAL_LAYER,
    LOCAL_LAYER,
    RECURRENT_LAYERS,
    read_windows,
)
from deployments.engines.pytorch.latent_attention import keep_latents
from deployments.engines.pytorch.slot_arrays import SlotLayout
from deployments.engines.pytorch.slot_cache import SlotCache, read_layout
from deployments.engines.pytorch.transformers_attention import register_attention
from deployments.engines.pytorch.transformers_experts import register_experts

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

_NO_STATES: Mapping[str, torch.Tensor] = MappingProxyType({})


class KvCacheProgram:
    """A model that reads and writes given KV arrays and recurrent states, and returns logits."""

    def __init__(self, model: Any, attention: Attention, *, kv_offload: bool = False) -> None:
        """Wrap `model`. With `kv_offload` the KV arrays are on the host, whatever its device."""
        from transformers import DynamicCache

        name, self._build_mask = register_attention(attention)
        model.set_attn_implementation(name)
        model.set_experts_implementation(register_experts())
        keep_latents(model)
        _fix_quantiles(model)
        self.model = model
        # The sliding window is the same in all layers that have one.
        self._window = next(filter(None, read_windows(model.config)), None)
        self._write_kv = _write_to_host if kv_offload else _write_in_place
        cache = DynamicCache(config=model.config)
        self._is_recurrent = any(hasattr(layer, "conv_states") for layer in cache.layers)
        self._kv_layers, self.layout = self._read_layout(cache)

    def __call__(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        wanted: torch.Tensor,
        memory: Sequence[torch.Tensor],
        states: Mapping[str, torch.Tensor] = _NO_STATES,
    ) -> torch.Tensor:
        import torch

        tokens = torch.arange(ids.shape[1], device=lengths.device)
        positions = lengths[:, None] + tokens
        cache = SlotCache(self._kv_layers, memory, states, positions, self._write_kv)
        output = self._run(ids, positions, memory[0], cache, logits_to_keep=wanted)
        logits: torch.Tensor = output.logits.float()
        return logits

    def _read_layout(self, cache: DynamicCache) -> tuple[list[int], SlotLayout]:
        """Run one token with the cache of transformers, and read there what layers store."""
        import torch

        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        cached = torch.zeros((1, 1, 1, 1), dtype=self.model.dtype, device=ids.device)
        with torch.no_grad():
            self._run(ids, ids, cached, cache)
        return read_layout(cache)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cached: torch.Tensor,
        cache: Any,
        **options: torch.Tensor,
    ) -> Any:
        mask = self._build_mask(positions, cached, self._window)
        if self._is_recurrent:  # recurrent layers would multiply their input by a mask
            attention = dict.fromkeys((GLOBAL_LAYER, LOCAL_LAYER), mask)
            mask = attention | dict.fromkeys(RECURRENT_LAYERS)
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **options,
        )


def _fix_quantiles(model: Any) -> None:
    """Compute the quantiles of Gemma 3n's MLPs once.

    transformers does so on the host in every step, and a CUDA graph cannot wait for the host.
    """
    import torch

    for module in model.modules():
        if hasattr(module, "_gaussian_topk") and module.activation_sparsity > 0:
            share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
            deviations = torch.distributions.Normal(0, 1).icdf(share).to(model.dtype)
            module._gaussian_topk = partial(_cut_off, deviations=deviations.item())


def _cut_off(inputs: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract the mean plus so many standard deviations of each row, and keep what is positive."""
    spread = inputs.std(dim=-1, keepdim=True, unbiased=False)
    return (inputs - (inputs.mean(dim=-1, keepdim=True) + spread * deviations)).relu()


def _write_in_place(
    array: torch.Tensor, new: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Write new keys or values [B, heads, T, size] to a cache array. Return the array."""
    # Attention multiplies masked positions by zero, but zero times NaN is NaN. A NaN would also
    # reach the next request in the slot.
    finite = new.nan_to_num(0.0, 0.0, 0.0)
    return array.scatter_(2, positions[:, None, :, None].expand(new.shape), finite)


def _write_to_host(array: torch.Tensor, new: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Write to an array on the host. Return a copy of the array on the device of `new`."""
    host = array.device
    return _write_in_place(array, new.to(host), positions.to(host)).to(new.device)
