"""Architecture-independent view of encoder layers: channel groups between two linear layers.

A group is an attention head or a single feed-forward channel, between the linear layers `source`
and `sink`. A channel is constant when its row in `source` or its column in `sink` is zero.
Attention weights sum to one, so a head with zero value weights always returns its value bias. A
feed-forward channel with zero weights returns its activated bias. Removal adds the effect of this
constant to the bias of `sink`. A head with zero query or key weights averages its values and is not
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.layouts import LAYOUTS, ArchitectureLayout
from build_artifacts.types import TorchTensor

Linear = Any  # a torch.nn.Linear with a bias


@dataclass(frozen=True, slots=True)
class ChannelGroups:
    """Groups of channels of one layer: its attention heads, or its feed-forward channels."""

    source: Linear  # weight [groups * width, inputs]
    sink: Linear  # weight [outputs, groups * width]
    paired_linears: tuple[Linear, ...]  # shaped like `source`; `remove` cuts the same rows
    activation: Callable[[TorchTensor], TorchTensor]  # applied between `source` and `sink`
    width: int  # channels per group

    @property
    def count(self) -> int:
        return int(self.source.out_features) // self.width

    @property
    def parameters(self) -> int:
        """Number of weights and biases per group."""
        inputs = sum(linear.in_features + 1 for linear in (self.source, *self.paired_linears))
        return int(inputs + self.sink.out_features) * self.width

    def constant(self) -> tuple[int, ...]:
        """Return the groups whose contribution is the same for every token."""
        channels = (self.source.weight == 0).all(dim=1) | (self.sink.weight == 0).all(dim=0)
        units = channels.view(-1, self.width).all(dim=1)
        return tuple(units.nonzero().flatten().tolist())

    def removable(self) -> tuple[int, ...]:
        """Return the constant groups. If all are constant, omit the first: a layer needs one."""
        constant = self.constant()
        return constant[1:] if len(constant) == self.count else constant

    def remove(self, units: Sequence[int]) -> None:
        """Remove constant groups in place and add their contribution to the bias of `sink`."""
        import torch

        if not units:
            return
        gone = torch.zeros(self.count, dtype=torch.bool)
        gone[list(units)] = True
        gone = gone.repeat_interleave(self.width)
        with torch.no_grad():
            # Sum in double precision: the sum may have thousands of terms.
            added = self.activation(self.source.bias.float())[gone].double()
            bias = self.sink.bias.double() + self.sink.weight[:, gone].double() @ added
            self.sink.bias.copy_(bias)
            _replace(self.sink, "weight", self.sink.weight[:, ~gone])
            self.sink.in_features = self.sink.weight.shape[1]
            for linear in (self.source, *self.paired_linears):
                _replace(linear, "weight", linear.weight[~gone])
                _replace(linear, "bias", linear.bias[~gone])
                linear.out_features = linear.weight.shape[0]


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer of a model with its channel groups."""

    layout: ArchitectureLayout
    attention: Any  # torch.nn.Module
    heads: ChannelGroups
    ffn_channels: ChannelGroups

    def remove_heads(self, heads: Sequence[int]) -> None:
        """Remove constant heads in place and update the sizes in the attention module."""
        if not heads:
            return
        remaining = [head for head in range(self.heads.count) if head not in heads]
        self.heads.remove(heads)
        setattr(self.attention, self.layout.heads, len(remaining))
        setattr(self.attention, self.layout.all_heads_width, len(remaining) * self.heads.width)
        if self.layout.per_head_argument is not None:
            _select_heads(self.attention, self.layout.per_head_argument, remaining)


def encoder_layers(model: TorchModel) -> tuple[EncoderLayer, ...]:
    """Return the layers of `model`; empty if the architecture or a layer's modules are unknown."""
    layout = LAYOUTS.get(model.config.model_type)
    if layout is None:
        return ()
    stack = dict(model.base_model.named_modules()).get(layout.layers, ())
    layers = [_open_layer(layer, layout) for layer in stack]
    opened = tuple(layer for layer in layers if layer is not None)
    return opened if len(opened) == len(layers) else ()


def _open_layer(layer: Any, layout: ArchitectureLayout) -> EncoderLayer | None:
    from torch import nn

    modules = dict(layer.named_modules())
    scores = (*layout.scores, *(path for path in layout.optional_scores if path in modules))
    # Accept only nn.Linear itself: subclasses for quantization or adapters compute something else.
    linears = {
        path: module
        for path, module in modules.items()
        if type(module) is nn.Linear and module.bias is not None
    }
    needed = {*scores, layout.value, layout.attention_output, layout.ffn_up, layout.ffn_down}
    if not needed <= linears.keys() or not {layout.attention, layout.activation} <= modules.keys():
        return None
    attention = modules[layout.attention]
    heads = ChannelGroups(
        source=linears[layout.value],
        sink=linears[layout.attention_output],
        paired_linears=tuple(linears[path] for path in scores),
        activation=_identity,
        width=getattr(attention, layout.head_width),
    )
    ffn_channels = ChannelGroups(
        source=linears[layout.ffn_up],
        sink=linears[layout.ffn_down],
        paired_linears=(),
        activation=modules[layout.activation],
        width=1,
    )
    return EncoderLayer(layout, attention, heads, ffn_channels)


def _identity(values: TorchTensor) -> TorchTensor:
    return values


def _replace(linear: Linear, name: str, values: TorchTensor) -> None:
    from torch import nn

    requires_grad = getattr(linear, name).requires_grad
    setattr(linear, name, nn.Parameter(values.contiguous(), requires_grad=requires_grad))


def _select_heads(attention: Any, place: int, remaining: list[int]) -> None:
    """Make `attention` read only the `remaining` heads of its argument [B, heads, T, T]."""

    def select(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:place], args[place][:, remaining], *args[place + 1 :])

    attention.register_forward_pre_hook(select)
