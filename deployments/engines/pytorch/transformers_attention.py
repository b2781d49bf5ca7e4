"""Attention of transformers models over KV slots: masks, and functions that transformers calls.

The functions read the cached keys and values without copies. A layer tells its function whether it
has a soft cap or attention sinks. All layers get the same mask, which therefore contains a mask for
layers without a sliding window and one for those with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deployments.artifacts.types import Attention
from deployments.engines.layer_types import read_windows
from deployments.engines.pytorch.latent_attention import over_latents

if TYPE_CHECKING:
    import torch

    # Takes the positions of the new tokens [B, T], a cache array [B, heads, M, size], and the
    # sliding window of the model. The result must have four dimensions: transformers passes such a
    # mask on to the attention function unchanged.
    BuildMask = Callable[[torch.Tensor, torch.Tensor, int | None], torch.Tensor]

# Names under which transformers finds the attention functions. No name contains "flash" or "sdpa":
# transformers would use its own flash kernel, which needs another cache, and refuse the second for
# models with soft caps or sinks.
_NAMES: Mapping[Attention, str] = {
    "sdpa": "fused-in-rows", "flash": "lengths-in-rows", "eager": "products-in-rows",
}  # fmt: skip


def register_attention(attention: Attention) -> tuple[str, BuildMask]:
    """Register the attention functions. Return the name for transformers, and the mask builder."""
    from transformers import AttentionInterface

    functions: Mapping[Attention, Callable[..., object]] = {
        "sdpa": over_latents(_attend), "flash": _attend_by_length,
        "eager": over_latents(_attend_by_products),
    }  # fmt: skip
    for kind, function in functions.items():
        AttentionInterface.register(_NAMES[kind], function)
    return _NAMES[attention], _build_lengths if attention == "flash" else _build_masks


def _build_masks(positions: torch.Tensor, cached: torch.Tensor, window: int | None) -> torch.Tensor:
    """Build additive masks [B, 1 or 2, T, M]: a token sees itself and earlier tokens.

    With a window there is a second mask, in which a token sees the last `window` of these only.
    """
    import torch

    kv_positions = torch.arange(cached.shape[2], device=positions.device)
    queries = positions[:, None, :, None]
    masked = kv_positions > queries
    if window:
        outside = torch.logical_or(masked, kv_positions <= queries - window)
        masked = torch.cat((masked, outside), dim=1)
    return masked.to(cached.dtype).masked_fill(masked, float("-inf"))


def _build_lengths(
    positions: torch.Tensor, _cached: torch.Tensor, _window: int | None
) -> torch.Tensor:
    """Return the tokens per slot, new tokens included, as [B, 1, 1, 1]."""
    return (positions[:, -1] + 1).int().reshape(-1, 1, 1, 1)


def _attend(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [B, Q, T, size] to keys [B, heads, M, size]. Return [B, T, Q, size].

    Q is the number of query heads, M the number of cached tokens. Query heads that share a key head
    become additional tokens of that head. Otherwise torch would copy the keys for each query head.
    The fused kernels have neither soft caps nor sinks, so such layers multiply separately.
    """
    import torch

    if options.get("softcap") or options.get("s_aux") is not None:
        return _attend_by_products(module, query, key, value, attention_mask, **options)
    _check(options)
    heads = key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        _group_heads(query, heads),
        key,
        value,
        attn_mask=_select_mask(attention_mask, query.shape[1] // heads, module),
        scale=options.get("scaling"),
    )
    return _join_heads(output, query), None


def _attend_by_products(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Do the same as `_attend` with separate products, also with soft caps and sinks.

    A sink is a score of a query head that takes part in the softmax and has no value.
    """
    import torch

    _check(options)
    rows, queries, tokens, size = query.shape
    heads = key.shape[1]
    scaling, softcap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    scaled = _group_heads(query, heads) * (size**-0.5 if scaling is None else scaling)
    scores = (scaled @ key.transpose(2, 3)).float()
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + _select_mask(attention_mask, queries // heads, module)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        per_query = sinks.float().reshape(1, queries, 1, 1).expand(rows, queries, tokens, 1)
        weights = torch.cat((scores, _group_heads(per_query, heads)), dim=-1).softmax(dim=-1)
        weights = weights[..., :-1]
    output = weights.to(value.dtype) @ value
    return _join_heads(output, query), None


def _attend_by_length(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Do the same as `_attend` with `flash_attn`, which reads only the valid tokens of each slot.

    `attention_mask` contains the result of `_build_lengths`. The queries are the last T tokens of
    each slot. Raises NotImplementedError for sinks.
    https://github.com/Dao-AILab/flash-attention
    """
    from flash_attn import flash_attn_with_kvcache

    _check(options, "s_aux")
    window = _find_window(module)
    output: torch.Tensor = flash_attn_with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=attention_mask.flatten(),
        softmax_scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        causal=True,
        # Tokens before and after the query's own; -1: all.
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return output, None


def _check(options: Mapping[str, Any], *unsupported: str) -> None:
    """Raise NotImplementedError if a layer sets an option of this name, or a position bias."""
    for name in ("position_bias", *unsupported):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention with `{name}`")


def _group_heads(array: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape [B, Q, T, size] to [B, heads, Q / heads * T, size]."""
    rows, queries, tokens, size = array.shape
    return array.reshape(rows, heads, queries // heads * tokens, size)


def _join_heads(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Reshape [B, heads, Q / heads * T, size] to [B, T, Q, size], without gaps in memory.

    With latent attention this size is not that of the queries. Layers join the last two dimensions,
    some of them (AFMoE) with `view`, which makes no copy.
    """
    shape = (*query.shape[:3], output.shape[3])
    return output.reshape(shape).transpose(1, 2).contiguous()


def _select_mask(masks: torch.Tensor, groups: int, module: object) -> torch.Tensor:
    """Return the mask of a layer for `groups` query heads per key head: [B, 1, groups * T, M]."""
    mask = masks[:, :1] if _find_window(module) is None else masks[:, -1:]
    return mask.repeat(1, 1, groups, 1)


def _find_window(module: Any) -> int | None:
    """Return the sliding window of the layer of an attention module, None without one.

    The window that transformers passes is not used: Qwen2 MoE passes none, and OLMoE one that it
    does not have.
    """
    layer: int = module.layer_idx
    return read_windows(module.config)[layer]
