"""transformers' own models over rows of memory that they are given, and that stay where they are.

A cache that is the memory, a mask that says how much of each row is valid, and attention that takes
keys and values as they are kept. Inputs and output are told in torch_decoder.py; the build traces
such a model into a program, and checkpoints that were sealed whole are opened as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.artifacts.types import Attention
from deployments.engines.decoder import DecoderSpec
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

    # Memory, what is to be written to it, and where: gives all of the memory.
    _Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# What transformers is to call an attention by.
_ATTENTIONS: Mapping[Attention, str] = {"sdpa": "sdpa-in-rows", "eager": "eager"}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_of(spec: DecoderSpec) -> torch.dtype:
    """The type of what is computed in floats, keys and values among it."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[spec.compute_precision])
    return dtype


def open_checkpoint(spec: DecoderSpec, device: str) -> torch.nn.Module:
    """The model in the directory of `spec.path`, over rows, on `device`.

    Of a model that is spread over several GPUs, the share of this process, which has joined the
    others before (parallel_decoder.py). Only safetensors are read, and no code of the checkpoint.
    Raises EngineFailed when it is not the model that the spec is of.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    options, generation_config = spec.options, spec.generation_config
    model = AutoModelForCausalLM.from_pretrained(
        spec.path.parent,
        dtype=dtype_of(spec),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        attn_implementation=_registered(options.attention),  # nor kernels that its config names
        **_placement(options.tensor_parallel_size, device),
    )
    due = (generation_config.layers, spec.vocabulary)
    if (found := (model.config.num_hidden_layers, model.config.vocab_size)) != due:
        raise EngineFailed(f"the checkpoint has {found} layers and words, not {due}")
    return with_external_kv(model.eval(), options.attention, kv_offload=options.kv_offload)


def with_external_kv(
    model: Any, attention: Attention, *, kv_offload: bool = False
) -> torch.nn.Module:
    """A module that reads from and writes to memory it is given, and answers logits.

    `kv_offload`: the memory is on the host, wherever the model is.
    """
    import torch

    model.set_attn_implementation(_registered(attention))
    keep = _write_to_host if kv_offload else _write

    class Program(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
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
            places = lengths[:, None] + torch.arange(input_ids.shape[1], device=lengths.device)
            room = torch.arange(memory[0].shape[2], device=lengths.device)
            hidden = room > places[:, None, :, None]  # [B, 1, T, room]
            answer = self.model(
                input_ids=input_ids,
                position_ids=places,
                attention_mask=hidden.to(memory[0].dtype).masked_fill(hidden, float("-inf")),
                past_key_values=_cache(memory, places, keep),
                use_cache=True,
                logits_to_keep=wanted,
            )
            return answer.logits.float()

    return Program()


def _placement(tensor_parallel_size: int, device: str) -> Mapping[str, Any]:
    if tensor_parallel_size == 1:
        return {"device_map": device}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=tensor_parallel_size)}


def _registered(attention: Attention) -> str:
    """What transformers calls it by."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTIONS["sdpa"], _attend)
    return _ATTENTIONS[attention]


def _attend(
    _module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [B, Q, T, size] to memory [B, heads, M, size], gives [B, T, Q, size].

    Queries that share a head of the memory are read as so many tokens of it, because torch would
    first copy the memory for each of them.
    """
    import torch

    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if how.get(name)]:
        raise NotImplementedError(f"attention with `{unknown[0]}`")
    rows, queries, tokens, size = query.shape
    heads = key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, queries // heads * tokens, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, queries // heads, 1),
        scale=how.get("scaling"),
    )
    return found.reshape(rows, queries, tokens, size).transpose(1, 2), None


def _cache(memory: Sequence[torch.Tensor], places: torch.Tensor, keep: _Keep) -> Any:
    """The memory as transformers' models use it; tokens [B, T] belong at `places` [B, T]."""
    from transformers import Cache

    class Rows(Cache):  # type: ignore[misc]  # transformers is not typed
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            kept_keys, kept_values = memory[2 * layer : 2 * layer + 2]
            return keep(kept_keys, keys, places), keep(kept_values, values, places)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0  # each row has its own

    return Rows(layers=[])


def _write(kept: torch.Tensor, fresh: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Write fresh keys or values, [B, heads, T, size], to the memory, and give all of it."""
    # What is masked is multiplied by zero, which NaN outlasts: whoever has the row next would get
    # it too.
    finite = fresh.nan_to_num(0.0, 0.0, 0.0)
    return kept.scatter_(2, places[:, None, :, None].expand(fresh.shape), finite)


def _write_to_host(kept: torch.Tensor, fresh: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """As `_write`, to a memory on the host; it is brought to where the fresh ones are."""
    there = kept.device
    return _write(kept, fresh.to(there), places.to(there)).to(fresh.device)
