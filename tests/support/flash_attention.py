"""Fake of the package `flash_attn`, which supports GPUs only."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

NAME = "flash_attn"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    **options: Any,
) -> torch.Tensor:
    """Attend from queries [B, T, Q, size] to the valid keys of [B, M, heads, size].

    The last query attends to all valid keys. Each earlier query attends to one key fewer than
    the next query. With a window, a query attends to its own key and to so many before it.
    """
    softcap, (before, after) = options.pop("softcap"), options.pop("window_size")
    assert options == {"causal": True}
    assert after == (-1 if before == -1 else 0)
    assert cache_seqlens.dtype == torch.int32
    tokens, queries, heads = q.shape[1], q.shape[2], k_cache.shape[2]
    rows = []
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = (
            cache[row, :length].repeat_interleave(queries // heads, dim=1).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        scores = q[row].transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        every = torch.ones(tokens, length, dtype=torch.bool)
        hidden = every.triu(1 + length - tokens)
        if before >= 0:
            hidden |= every.tril(length - tokens - before - 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        rows.append((weights @ values).transpose(0, 1))
    return torch.stack(rows)


def install(patch: pytest.MonkeyPatch) -> None:
    """Make this fake importable as the package `flash_attn`."""
    module = ModuleType(NAME)
    module.__spec__ = ModuleSpec(NAME, None)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    patch.setitem(sys.modules, NAME, module)
