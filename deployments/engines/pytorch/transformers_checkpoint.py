"""Checkpoints that transformers runs over an external KV cache, without tracing (kv_program.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deployments.artifacts.types import DTYPE_NAMES
from deployments.engines.decoder import DecoderSpec
from deployments.engines.pytorch.kv_program import KvCacheProgram
from deployments.engines.pytorch.transformers_attention import register_attention
from deployments.engines.pytorch.transformers_experts import register_experts
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch


def torch_dtype(spec: DecoderSpec) -> torch.dtype:
    """Return the dtype of activations, keys and values."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPE_NAMES[spec.compute_precision])
    return dtype


def open_checkpoint(spec: DecoderSpec, device: str) -> KvCacheProgram:
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
    program = KvCacheProgram(model.eval(), options.attention, kv_offload=options.kv_offload)
    expected = (config.layers, spec.vocabulary)
    actual = (len(program.layout.kv_shapes) // 2, model.config.vocab_size)
    if actual != expected:
        raise EngineFailed(
            f"the checkpoint has {actual} layers with keys and tokens; expected {expected}"
        )
    return program


def _placement_arguments(tensor_parallel_size: int, device: str) -> Mapping[str, Any]:
    if tensor_parallel_size == 1:
        return {"device_map": device}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)}
