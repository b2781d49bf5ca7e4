"""Which heads and feed-forward rows of a loaded encoder are constant."""

from __future__ import annotations

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.layers import EncoderLayer, encoder_layers
from build_artifacts.compaction.plan import Compaction, LayerReduction


def find(model: TorchModel) -> Compaction:
    """What `compact` may remove from `model`, an fp32 encoder with any head on top.

    Only exact zeros count. At least one head and one feed-forward row stay in every layer. An
    unknown architecture gives an empty compaction.
    """
    layers = encoder_layers(model)
    cuts = tuple(cut for i, layer in enumerate(layers) if (cut := _cut(i, layer)))
    parameters = parameter_count(model)
    return Compaction(
        architecture=model.config.model_type,
        cuts=cuts,
        heads_before=sum(layer.heads.count for layer in layers),
        rows_before=sum(layer.rows.count for layer in layers),
        parameters_before=parameters,
        parameters_after=parameters - sum(_saved(layers[cut.layer], cut) for cut in cuts),
    )


def parameter_count(model: TorchModel) -> int:
    """Weights and biases of `model`; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _cut(index: int, layer: EncoderLayer) -> LayerReduction | None:
    heads, rows = layer.heads.removable(), layer.rows.removable()
    return LayerReduction(layer=index, heads=heads, rows=rows) if heads or rows else None


def _saved(layer: EncoderLayer, cut: LayerReduction) -> int:
    return len(cut.heads) * layer.heads.parameters + len(cut.rows) * layer.rows.parameters
