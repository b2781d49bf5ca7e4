"""Search for constant attention heads and feed-forward channels of an encoder."""

from __future__ import annotations

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.layers import EncoderLayer, encoder_layers
from build_artifacts.compaction.plan import Compaction, LayerReduction


def find_compaction(model: TorchModel) -> Compaction:
    """Find what `compact` may remove from `model`, an fp32 encoder for any task.

    Only weights of exactly zero make a head or channel removable. Each layer retains at least one
    head and one feed-forward channel. For unknown architectures, the compaction is empty.
    """
    layers = encoder_layers(model)
    reductions = tuple(
        reduction for i, layer in enumerate(layers) if (reduction := _plan_layer(i, layer))
    )
    parameters = parameter_count(model)
    return Compaction(
        architecture=model.config.model_type,
        reductions=reductions,
        heads_before=sum(layer.heads.count for layer in layers),
        ffn_channels_before=sum(layer.ffn_channels.count for layer in layers),
        parameters_before=parameters,
        parameters_after=parameters
        - sum(_count_removed(layers[reduction.layer], reduction) for reduction in reductions),
    )


def parameter_count(model: TorchModel) -> int:
    """Count weights and biases; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _plan_layer(index: int, layer: EncoderLayer) -> LayerReduction | None:
    heads, ffn_channels = layer.heads.removable(), layer.ffn_channels.removable()
    return (
        LayerReduction(layer=index, heads=heads, ffn_channels=ffn_channels)
        if heads or ffn_channels
        else None
    )


def _count_removed(layer: EncoderLayer, reduction: LayerReduction) -> int:
    return (
        len(reduction.heads) * layer.heads.parameters
        + len(reduction.ffn_channels) * layer.ffn_channels.parameters
    )
