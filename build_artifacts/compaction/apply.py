"""Taking what `find` found out of a model, before it is exported."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.compaction.find import parameter_count
from build_artifacts.compaction.layers import ChannelGroups, encoder_layers
from build_artifacts.compaction.plan import Compaction
from build_artifacts.errors import BuildError


class CompactionMismatch(BuildError):
    """The compaction was found in another model; this one was not touched."""

    code = "compaction_misfit"


def compact(model: TorchModel, compaction: Compaction) -> TorchModel:
    """`model` without what `compaction` names, changed in place; its answers stay the same.

    The model may be loaded in another precision than the one `find` saw. It can be run and
    exported, not saved: its configuration still has the old sizes. Raises CompactionMismatch.
    """
    _check_same_model(model, compaction)
    layers = encoder_layers(model)
    for cut in compaction.cuts:
        if cut.layer >= len(layers):
            raise _misfit(f"names layer {cut.layer}, the model has {len(layers)}")
        _check_constant(layers[cut.layer].heads, cut.heads, f"heads of layer {cut.layer}")
        _check_constant(layers[cut.layer].rows, cut.rows, f"rows of layer {cut.layer}")
    for cut in compaction.cuts:
        layers[cut.layer].remove_heads(cut.heads)
        layers[cut.layer].rows.remove(cut.rows)
    return model


def _check_same_model(model: TorchModel, compaction: Compaction) -> None:
    architecture = model.config.model_type
    if architecture != compaction.architecture:
        raise _misfit(f"is for `{compaction.architecture}`, the model is `{architecture}`")
    parameters = parameter_count(model)
    if parameters != compaction.parameters_before:
        raise _misfit(
            f"is for {compaction.parameters_before:,} parameters, the model has {parameters:,}"
        )


def _check_constant(units: ChannelGroups, chosen: Sequence[int], what: str) -> None:
    if varying := sorted(set(chosen) - set(units.constant())):
        raise _misfit(f"removes {what} that the model needs: {varying[:8]}")
    if len(chosen) >= units.count:
        raise _misfit(f"removes all {units.count} {what}")


def _misfit(why: str) -> CompactionMismatch:
    return CompactionMismatch(
        f"the compaction does not fit the model: it {why}",
        hint="find it again in the weights that are built",
    )
