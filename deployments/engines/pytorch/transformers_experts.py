"""Mixtures of experts of transformers models, as products of groups of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAME = "rows-by-expert"


def register_experts() -> str:
    """Register `_compute_experts`. Return its name for transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NAME, _compute_experts)
    return _NAME


def _compute_experts(
    module: Any, hidden: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the selected experts of N tokens. Return the weighted sum for each token, [N, size].

    `hidden` is [N, size], `selected` [N, K] the numbers of the experts, `weights` [N, K]. The
    module has the weights of E experts, as transformers stores them. Each of the N * K selections
    becomes a row. Rows of an expert are adjacent, so that one call multiplies all of them and reads
    only the experts that are selected. No step depends on which these are: it can be captured as a
    CUDA graph, where torch has a kernel for groups (capture.py).
    """
    import torch

    tokens, count = selected.shape
    experts, order = torch.sort(selected.reshape(-1), stable=True)
    numbers = torch.arange(module.num_experts, device=selected.device)
    ends = torch.searchsorted(experts, numbers, right=True).int()  # of the rows of each expert

    def multiply(rows: torch.Tensor, name: str) -> torch.Tensor:
        matrices = getattr(module, name)  # [E, out, in], or transposed
        if not module.is_transposed:
            matrices = matrices.transpose(1, 2)
        rows = torch.nn.functional.grouped_mm(rows.to(matrices.dtype), matrices, offs=ends)
        return rows + getattr(module, f"{name}_bias")[experts] if module.has_bias else rows

    rows = hidden[torch.div(order, count, rounding_mode="floor")]
    rows = multiply(module._apply_gate(multiply(rows, "gate_up_proj")), "down_proj")
    rows = rows * weights.reshape(-1)[order, None]
    rows = rows[torch.argsort(order)].reshape(tokens, count, -1)  # in the order of `selected`
    return rows.sum(dim=1).to(hidden.dtype)
