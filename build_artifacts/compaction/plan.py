"""Serializable description of the parts that a compaction removes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, NonNegativeInt, model_validator

from deployments.artifacts.types import FrozenModel


def _ascending(indices: tuple[int, ...]) -> tuple[int, ...]:
    if list(indices) != sorted(set(indices)):
        raise ValueError("indices must ascend without repeats")
    return indices


Indices = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_ascending)]


class LayerReduction(FrozenModel):
    """Parts to remove from one layer; indices refer to the layer before the removal."""

    layer: NonNegativeInt
    heads: Indices = ()
    ffn_channels: Indices = ()  # output rows of the first feed-forward Linear

    @model_validator(mode="after")
    def _removes_something(self) -> Self:
        if not self.heads and not self.ffn_channels:
            raise ValueError("a reduction removes a head or a channel")
        return self


class Compaction(FrozenModel):
    """Attention heads and feed-forward channels that `compact` removes from one encoder.

    Each of them contributes the same value for every token. `reductions` lists only affected
    layers, in ascending order. For an unknown architecture, the counts of heads and channels are 0.
    The parameter counts include the task head.
    """

    architecture: str  # `model_type` of the config
    reductions: tuple[LayerReduction, ...] = ()
    heads_before: NonNegativeInt
    ffn_channels_before: NonNegativeInt
    parameters_before: NonNegativeInt
    parameters_after: NonNegativeInt

    @model_validator(mode="after")
    def _check_layer_order(self) -> Self:
        _ascending(tuple(reduction.layer for reduction in self.reductions))
        return self

    @property
    def is_empty(self) -> bool:
        return not self.reductions

    @property
    def heads_after(self) -> int:
        """Number of attention heads that remain in all layers together."""
        return self.heads_before - sum(len(reduction.heads) for reduction in self.reductions)

    @property
    def ffn_channels_after(self) -> int:
        """Number of feed-forward channels that remain in all layers together."""
        return self.ffn_channels_before - sum(
            len(reduction.ffn_channels) for reduction in self.reductions
        )

    def describe(self) -> str:
        """Describe the removed parts in one line."""
        if self.is_empty:
            return "nothing to remove"
        channels = self.ffn_channels_before - self.ffn_channels_after
        before, after = map(_format_count, (self.parameters_before, self.parameters_after))
        return (
            f"removed {self.heads_before - self.heads_after:,} of {self.heads_before:,} heads and "
            f"{channels:,} of {self.ffn_channels_before:,} feed-forward channels: "
            f"{before} -> {after} parameters"
        )


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1_000_000 else f"{parameters:,}"
