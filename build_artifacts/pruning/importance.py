"""Importance of attention heads and feed-forward channels, measured on calibration items.

The importance of a head or a channel is the mean over the items of |sum of activation x gradient|.
This mean approximates, to first order, the change of the loss without the head or channel. The
method for heads is from Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?"
(2019). The method for channels is from Molchanov et al., "Importance Estimation for Neural Network
Pruning" (2019).

The loss is the negative log-likelihood of an answer that is drawn from the model's own output. The
Fisher information of Kwon et al. uses the same loss ("A Fast Post-Training Pruning Framework for
Transformers", 2022). The items therefore need no labels, and all tasks share one method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from build_artifacts.checkpoints.export_wrapper import input_names, wrap_for_export
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.layers import ChannelGroups, EncoderLayer
from build_artifacts.types import TorchTensor
from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import build_feeds
from deployments.messages import TokenizedItem

_SEED = 0  # seed of the drawn answers, so that equal items give equal importances


class GroupStatistics(NamedTuple):
    """Statistics over all items, for the heads or the feed-forward channels of one layer.

    A head is a group of channels. A feed-forward channel is a group of its own.
    """

    importance: TorchTensor  # float64 [groups]
    moments: TorchTensor  # [C + 1, C + 1], sum over tokens of x x^T; x: a token's channels and a 1


class LayerStatistics(NamedTuple):
    """Statistics of the heads and channels of one encoder layer over all items."""

    heads: GroupStatistics
    ffn_channels: GroupStatistics


def measure(
    model: TorchModel,
    layers: Sequence[EncoderLayer],
    metadata: CheckpointMetadata,
    items: Sequence[TokenizedItem],
) -> list[LayerStatistics]:
    """Return the statistics of each layer, from one forward and backward pass per item.

    Items without an output, such as texts without a mask token for fill-mask, do not count. `model`
    must be in fp32 and stays unchanged.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    wrapped = wrap_for_export(model, metadata)
    names = input_names(model, metadata)
    observers = [(_Observer(layer.heads), _Observer(layer.ffn_channels)) for layer in layers]
    every = [observer for pair in observers for observer in pair]
    try:
        for item in items:
            feeds = build_feeds(collate([item]), names, metadata.mask_token)
            outputs = wrapped(**{n: torch.from_numpy(a) for n, a in feeds.arrays.items()})
            if not outputs.numel():  # the text has no mask token
                continue
            loss = -_draw_log_likelihood(outputs, metadata, generator)
            gradients = torch.autograd.grad(loss, [observer.inputs for observer in every])
            for observer, gradient in zip(every, gradients, strict=True):
                observer.add_item(gradient)
    finally:
        for observer in every:
            observer.hook.remove()
    return [LayerStatistics(heads.read(), channels.read()) for heads, channels in observers]


class _Observer:
    """Collector of the statistics of `groups`: observes the inputs of the layer `groups.sink`."""

    def __init__(self, groups: ChannelGroups) -> None:
        import torch

        channels = groups.sink.in_features
        self.inputs: Any = None  # inputs of `groups.sink` in the latest forward pass, [1, T, C]
        self.hook = groups.sink.register_forward_pre_hook(self._keep)
        self._width = groups.width
        self._items = 0
        self._importance = torch.zeros(groups.count, dtype=torch.float64)
        self._moments = torch.zeros(channels + 1, channels + 1)

    def _keep(self, _module: Any, args: tuple[Any, ...]) -> None:
        (self.inputs,) = args

    def add_item(self, gradient: TorchTensor) -> None:
        import torch

        inputs = self.inputs.detach().flatten(0, -2)
        products = (inputs * gradient.flatten(0, -2)).double().sum(0)
        self._importance += products.view(-1, self._width).sum(1).abs()
        self._items += 1
        extended = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
        self._moments.addmm_(extended.T, extended)

    def read(self) -> GroupStatistics:
        return GroupStatistics(self._importance / max(self._items, 1), self._moments)


def _draw_log_likelihood(
    outputs: TorchTensor, metadata: CheckpointMetadata, generator: Any
) -> TorchTensor:
    """Draw an answer from the `outputs` of an item and return its log-likelihood, a scalar.

    A label, a token, and the start and end of a span are drawn from the softmax. Vectors, single
    scores and the logits of multi-label models are drawn from a normal distribution around the
    output. Their log-likelihood has the same gradient as the sum of output x random noise, so the
    function returns this sum.
    """
    import torch

    is_number = metadata.problem_type is not None and outputs.shape[-1] == 1
    has_vectors = metadata.head in (ModelHead.VECTOR, ModelHead.SPARSE)
    if has_vectors or metadata.problem_type == "multi_label" or is_number:
        return (outputs * torch.randn(outputs.shape, generator=generator)).sum()
    choices = outputs.transpose(1, 2) if metadata.head is ModelHead.SPAN else outputs
    logits = choices.flatten(0, -2)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    return logits.log_softmax(-1).gather(1, drawn).sum()
