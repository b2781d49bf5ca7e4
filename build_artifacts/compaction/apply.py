"""Removal of constant heads and feed-forward channels from a model before export."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.find import parameter_count
from build_artifacts.compaction.layers import ChannelGroups, encoder_layers
from build_artifacts.compaction.plan import Compaction
from build_artifacts.errors import BuildError


class CompactionMismatch(BuildError):
    """Error of `compact` for the compaction of another model. The model stays unchanged."""

    code = "compaction_mismatch"


def compact(model: TorchModel, compaction: Compaction) -> TorchModel:
    """Remove the heads and channels in `compaction` from `model`, in place.

    The outputs stay the same, because only constant heads and channels are removed.

    `model` may have another precision than the model that `find_compaction` searched. The compacted
    model can run and be exported, but not saved, because its config has the old sizes.

    Raises CompactionMismatch if `compaction` is not for these weights.
    """
    _check_same_model(model, compaction)
    layers = encoder_layers(model)
    for reduction in compaction.reductions:
        if reduction.layer >= len(layers):
            raise _mismatch_error(f"names layer {reduction.layer}, the model has {len(layers)}")
        _check_constant(
            layers[reduction.layer].heads, reduction.heads, f"heads of layer {reduction.layer}"
        )
        _check_constant(
            layers[reduction.layer].ffn_channels,
            reduction.ffn_channels,
            f"feed-forward channels of layer {reduction.layer}",
        )
    for reduction in compaction.reductions:
        layers[reduction.layer].remove_heads(reduction.heads)
        layers[reduction.layer].ffn_channels.remove(reduction.ffn_channels)
    return model


def _check_same_model(model: TorchModel, compaction: Compaction) -> None:
    architecture = model.config.model_type
    if architecture != compaction.architecture:
        raise _mismatch_error(f"is for `{compaction.architecture}`, the model is `{architecture}`")
    parameters = parameter_count(model)
    if parameters != compaction.parameters_before:
        raise _mismatch_error(
            f"is for {compaction.parameters_before:,} parameters, the model has {parameters:,}"
        )


def _check_constant(units: ChannelGroups, chosen: Sequence[int], what: str) -> None:
    if varying := sorted(set(chosen) - set(units.constant())):
        raise _mismatch_error(f"removes {what} that the model needs: {varying[:8]}")
    if len(chosen) >= units.count:
        raise _mismatch_error(f"removes all {units.count} {what}")


def _mismatch_error(why: str) -> CompactionMismatch:
    return CompactionMismatch(
        f"the compaction does not match the model: it {why}",
        hint="build the model again from these weights",
    )
