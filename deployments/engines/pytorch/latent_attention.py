"""Attention over cached latent vectors, without keys and values of all heads in memory.

A layer of transformers projects all cached latent vectors to keys and values, in every step. Here
the projection to keys is applied to the queries instead, and that to values to the output, which
gives the same result. Source: DeepSeek-V2, section 2.1.2, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    # A function that transformers calls, see transformers_attention.py.
    _Attend = Callable[..., tuple[torch.Tensor, None]]


def keep_latents(model: Any) -> None:
    """Let layers with latent attention pass latent vectors on to the attention function.

    Layers whose projection is quantized go on passing keys and values.
    """
    for module in model.modules():
        if hasattr(module, "expand_kv") and module.kv_b_proj.weight.is_floating_point():
            module.expand_kv = _join_latents


def over_latents(attend: _Attend) -> _Attend:
    """Return `attend` for layers of any kind: it may then get latent vectors as keys and values."""

    def attend_to_any(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if getattr(module, "expand_kv", None) is not _join_latents:
            return attend(module, query, key, value, attention_mask, **options)
        import torch

        plain = module.qk_nope_head_dim
        projection = module.kv_b_proj.weight.reshape(query.shape[1], -1, value.shape[3])
        to_keys, to_values = projection[:, :plain], projection[:, plain:]
        projected = torch.cat((query[..., :plain] @ to_keys, query[..., plain:]), dim=-1)
        output, _ = attend(module, projected, key, value, attention_mask, **options)
        values = output.transpose(1, 2) @ to_values.transpose(1, 2)  # [B, heads, T, size]
        return values.transpose(1, 2).contiguous(), None

    return attend_to_any


def _join_latents(
    latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one head reads as keys and values: [B, 1, M, rank + RoPE], [B, 1, M, rank]."""
    import torch

    return torch.cat((latents, rotated), dim=-1), latents
