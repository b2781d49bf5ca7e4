"""Mixtures of experts of transformers models, as products of groups of rows.

A mixture is one operator, so that a torch program (program.py) contains neither the offsets of the
groups, which address GPU memory unchecked, nor the steps that compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXPERTS_OPERATOR = "hundredfold.compute_experts.default"  # name in torch programs
_NAME = "rows-by-expert"


def register_experts() -> str:
    """Register the operator with transformers. Return its name there."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NAME, _compute_module)
    return _NAME


def _compute_module(
    module: Any, hidden: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a module of transformers.

    Raises NotImplementedError for a form of experts that the operator does not have.
    """
    if not are_supported(module):
        raise NotImplementedError(f"experts of the form of `{type(module).__name__}`")
    clamp = [float(module.alpha), float(module.limit)] if hasattr(module, "limit") else []
    names = ("gate_up_proj", "down_proj")
    gate_up, down = (
        [getattr(module, name), *([getattr(module, f"{name}_bias")] if module.has_bias else [])]
        for name in names
    )
    output: torch.Tensor = find_experts_operator()(hidden, selected, weights, gate_up, down, clamp)
    return output


def are_supported(experts: Any) -> bool:
    """Return whether the operator has the form of these experts, a module of transformers."""
    from transformers.integrations.moe import _default_apply_gate

    is_clamped = hasattr(experts, "limit")
    activation = getattr(experts.config, "hidden_act", "silu")  # LFM2 MoE has no other
    is_silu = type(experts)._apply_gate is _default_apply_gate and activation == "silu"
    others = (not experts.has_gate, experts.has_post_expert_norm, experts._is_expert_parallel)
    return not any(others) and experts.is_transposed == is_clamped and (is_clamped or is_silu)


@cache
def find_experts_operator() -> Any:
    """Define the operator of torch, once. Return it."""
    import torch

    operator = torch.library.custom_op(
        EXPERTS_OPERATOR.removesuffix(".default").replace(".", "::"),
        _compute_experts,
        mutates_args=(),
        schema="(Tensor hidden, Tensor selected, Tensor weights, Tensor[] gate_up, Tensor[] down, "
        "float[] clamp) -> Tensor",
    )
    operator.register_fake(lambda hidden, *_: torch.empty_like(hidden))
    return torch.ops.hundredfold.compute_experts.default


def _compute_experts(
    hidden: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    clamp: Sequence[float],
) -> torch.Tensor:
    """Compute the selected experts of N tokens. Return the weighted sum for each token, [N, size].

    `hidden` is [N, size], `selected` [N, K] the numbers of the experts, `weights` [N, K]. `gate_up`
    and `down` are the matrices of E experts, [E, out, in], and their biases [E, out], if any.
    Experts of GPT-OSS have `clamp`, the factor of the sigmoid and the limit, and matrices
    [E, in, out].

    Each of the N * K selections becomes a row. Rows of an expert are adjacent, so that one call
    multiplies all of them and reads only the experts that are selected. No step depends on which
    these are: it can be captured as a CUDA graph, where torch has a kernel for groups (devices.py).
    """
    import torch

    (tokens, count), last = selected.shape, len(gate_up[0]) - 1
    experts, order = torch.sort(selected.reshape(-1).clamp(0, last), stable=True)
    numbers = torch.arange(last + 1, device=selected.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # of each expert's rows

    def multiply(rows: torch.Tensor, layer: Sequence[torch.Tensor]) -> torch.Tensor:
        matrices, *biases = layer
        if not clamp:
            matrices = matrices.transpose(1, 2)
        rows = torch.nn.functional.grouped_mm(rows.to(matrices.dtype), matrices, offs=ends)
        return rows + biases[0][experts] if biases else rows

    rows = hidden[torch.div(order, count, rounding_mode="floor")]
    rows = multiply(_apply_gate(multiply(rows, gate_up), clamp), down)
    rows = rows * weights.reshape(-1)[order, None]
    rows = rows[torch.argsort(order)].reshape(tokens, count, -1)  # in the order of `selected`
    return rows.sum(dim=1).to(hidden.dtype)


def _apply_gate(rows: torch.Tensor, clamp: Sequence[float]) -> torch.Tensor:
    """Apply the activation: silu(gate) x up, or GPT-OSS's variant, whose columns alternate."""
    import torch

    if not clamp:
        gate, up = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    factor, limit = clamp
    gate = rows[..., ::2].clamp(max=limit)
    up = rows[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(factor * gate))
