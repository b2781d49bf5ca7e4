"""Models of transformers over an external KV cache at fixed addresses.

A model becomes a torch module whose cache class writes to given tensors. A mask marks the valid
tokens of each slot (transformers_attention.py). decoder.py describes the inputs and the output of
the module. The build traces the module into a torch program. If the artifact contains a whole
checkpoint instead, the module runs without tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.artifacts.types import DTYPE_NAMES, Attention
from deployments.engines.decoder import DecoderSpec
from deployments.engines.pytorch.layer_types import read_windows
from deployments.engines.pytorch.transformers_attention import register_attention
from deployments.engines.pytorch.transformers_experts import register_experts
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

    # Takes a cache array, new keys or values, and their positions. Returns the whole array.
    _WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_dtype(spec: DecoderSpec) -> torch.dtype:
    """Return the dtype of activations, keys and values."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPE_NAMES[spec.compute_precision])
    return dtype


def open_checkpoint(spec: DecoderSpec, device: str) -> torch.nn.Module:
    """Open the checkpoint in the directory of `spec.path` on `device`.

    With tensor parallelism, open the shard of this process, which has joined the process group
    (tensor_parallel_decoder.py). Loads only safetensors and runs no code of the checkpoint. Raises
    EngineFailed if the checkpoint does not match the spec.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    options, config = spec.options, spec.generation_config
    model, info = AutoModelForCausalLM.from_pretrained(
        spec.path.parent,
        dtype=torch_dtype(spec),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        # Set explicitly, because a checkpoint's config may name kernels to download.
        attn_implementation=register_attention(options.attention)[0],
        experts_implementation=register_experts(),
        **_placement_arguments(options.tensor_parallel_size, device),
    )
    if missing := sorted(info["missing_keys"]):  # transformers has drawn them at random
        raise EngineFailed(f"the checkpoint has no weights for `{missing[0]}`")
    expected = (config.layers, spec.vocabulary)
    actual = (model.config.num_hidden_layers, model.config.vocab_size)
    if actual != expected:
        raise EngineFailed(f"the checkpoint has {actual} layers and tokens; expected {expected}")
    return with_external_kv(model.eval(), options.attention, kv_offload=options.kv_offload)


def with_external_kv(
    model: Any, attention: Attention, *, kv_offload: bool = False
) -> torch.nn.Module:
    """Wrap `model` as a module that reads and writes given KV arrays and returns logits.

    With `kv_offload` the arrays are on the host, whatever the device of the model.
    """
    import torch

    name, build_mask = register_attention(attention)
    model.set_attn_implementation(name)
    model.set_experts_implementation(register_experts())
    window = next(filter(None, read_windows(model.config)), None)  # the same in all layers with one
    write_kv = _write_to_host if kv_offload else _write_in_place

    class KvCacheProgram(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            lengths: torch.Tensor,
            wanted: torch.Tensor,
            memory: Sequence[torch.Tensor],
        ) -> torch.Tensor:
            # Stored programs name their inputs after these parameters, so do not rename them.
            tokens = torch.arange(input_ids.shape[1], device=lengths.device)
            positions = lengths[:, None] + tokens
            output = self.model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=build_mask(positions, memory[0], window),
                past_key_values=_build_cache(memory, positions, write_kv),
                use_cache=True,
                logits_to_keep=wanted,
            )
            return output.logits.float()

    return KvCacheProgram()


def _placement_arguments(tensor_parallel_size: int, device: str) -> Mapping[str, Any]:
    if tensor_parallel_size == 1:
        return {"device_map": device}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)}


def _build_cache(
    arrays: Sequence[torch.Tensor], positions: torch.Tensor, write_kv: _WriteKv
) -> Any:
    """Build a transformers cache over the KV arrays; new tokens are at `positions` [B, T]."""
    from transformers import Cache

    class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            cached_keys, cached_values = arrays[2 * layer : 2 * layer + 2]
            return (
                write_kv(cached_keys, keys, positions),
                write_kv(cached_values, values, positions),
            )

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0  # no common length: the mask and position_ids state the length per slot

    return SlotCache(layers=[])


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
